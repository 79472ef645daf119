/* Messages of several sizes and puts between two ranks, each against what was sent. */
#include "check.h"

int main(int count, char **words) {
    long *own, bad = 0;
    MPI_Win window;
    begin(&count, &words);
    int other = 1 - rank;
    MPI_Win_allocate(64 * sizeof(long), sizeof(long), MPI_INFO_NULL, WORLD, &own, &window);
    for (int turn = 0; turn < 6; turn++) {
        int bytes[] = {8, 400, 20000, 300000}, length = bytes[turn % 4];
        unsigned char *sent = malloc(length), *got = malloc(length);
        for (int at = 0; at < length; at++) sent[at] = at * 7 + turn + rank;
        MPI_Sendrecv(sent, length, MPI_BYTE, other, 1, got, length, MPI_BYTE, other, 1, WORLD, MPI_STATUS_IGNORE);
        for (int at = 0; at < length; at++) bad += got[at] != (unsigned char)(at * 7 + turn + other);
        long value = 100 * turn + rank;
        MPI_Win_fence(0, window);
        MPI_Put(&value, 1, MPI_LONG, other, turn, 1, MPI_LONG, window);
        MPI_Win_fence(0, window);
        bad += own[turn] != 100 * turn + other;
        free(sent);
        free(got);
    }
    MPI_Win_free(&window);
    expect(bad == 0, "what the other rank sent");
    return end();
}
