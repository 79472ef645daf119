/* More than 2^31 bytes in one call, on two ranks: mpi4py/mpi4py#575, #119, #23; pmodels/mpich#4720. The sender's pages are zero pages, so only the
 * receiver takes 2.2 GiB. The argument is 0 for a send, 1 for one of a contiguous type, 2 for a broadcast, 3 for a put. */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

enum { MARKS = 7, UNIT = 1 << 20, UNITS = 2200 };

int main(int count, char **arguments) {
    int rank, wrong = 0, how = count > 1 ? atoi(arguments[1]) : 0, units = UNITS;
    MPI_Init(&count, &arguments);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    size_t bytes = (size_t)UNITS * UNIT + (how == 1 ? 0 : 4093);
    size_t marks[MARKS] = {0, 4095, 1ul << 30, (1ul << 31) - 1, 1ul << 31, (1ul << 31) + 4097, bytes - 1};
    char *data = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (data == MAP_FAILED) return perror("mmap"), 3;
    for (int i = 0; rank == 0 && i < MARKS; i++) data[marks[i]] = (char)(11 + i);
    MPI_Status status;
    MPI_Count got = (MPI_Count)bytes;
    if (how == 0 && rank == 0) MPI_Send_c(data, got, MPI_BYTE, 1, 0, MPI_COMM_WORLD);
    if (how == 0 && rank == 1) {
        MPI_Recv_c(data, got, MPI_BYTE, 0, 0, MPI_COMM_WORLD, &status);
        MPI_Get_count_c(&status, MPI_BYTE, &got);
    }
    if (how == 1) {
        MPI_Datatype unit;
        MPI_Type_contiguous(UNIT, MPI_BYTE, &unit);
        MPI_Type_commit(&unit);
        if (rank == 0) MPI_Send(data, UNITS, unit, 1, 0, MPI_COMM_WORLD);
        if (rank == 1) {
            MPI_Recv(data, UNITS, unit, 0, 0, MPI_COMM_WORLD, &status);
            MPI_Get_count(&status, unit, &units);
        }
        MPI_Type_free(&unit);
    }
    if (how == 2) MPI_Bcast_c(data, got, MPI_BYTE, 0, MPI_COMM_WORLD);
    if (how == 3) {
        MPI_Win window;
        MPI_Win_create(rank ? data : NULL, rank ? got : 0, 1, MPI_INFO_NULL, MPI_COMM_WORLD, &window);
        MPI_Win_fence(0, window);
        if (rank == 0) MPI_Put_c(data, got, MPI_BYTE, 1, 0, got, MPI_BYTE, window);
        MPI_Win_fence(0, window);
        MPI_Win_free(&window);
    }
    wrong = got != (MPI_Count)bytes || units != UNITS;
    for (int i = 0; i < MARKS; i++) wrong |= data[marks[i]] != (char)(11 + i);
    printf("rank %d is %s\n", rank, wrong ? "WRONG" : "right");
    MPI_Finalize();
    return wrong;
}
