/* Datatypes whose pieces overlap in order, have holes, or come in odd counts, on two ranks or more: pmodels/mpich#3755, #5391, #6297, #2609. */
#include "check.h"
#include <stddef.h>

struct holed {
    int32_t small;
    uint64_t large;
};

/* Pieces of pieces, which the receiver takes in another order than they lie in. */
static void indexed_of_indexed(int count) {
    int lengths[] = {3, 1}, inner_at[] = {0, 14}, outer_at[] = {2, 0};
    MPI_Datatype inner, outer;
    MPI_Type_indexed(2, lengths, inner_at, MPI_INT, &inner);
    MPI_Type_indexed(2, lengths, outer_at, inner, &outer);
    MPI_Type_commit(&outer);
    MPI_Aint lower, inner_extent, extent;
    MPI_Type_get_extent(inner, &lower, &inner_extent);
    MPI_Type_get_extent(outer, &lower, &extent);
    int sent = 16 * count, room = (int)(extent / 4) * count + 64;
    if (rank == 0) {
        int *numbers = malloc(sent * sizeof *numbers);
        for (int i = 0; i < sent; i++) numbers[i] = i;
        MPI_Send(numbers, sent, MPI_INT, 1, 5, WORLD);
        free(numbers);
    }
    if (rank == 1) {
        int *got = malloc(room * sizeof *got), *expected = malloc(room * sizeof *expected), next = 0;
        for (int i = 0; i < room; i++) got[i] = expected[i] = -1;
        for (int element = 0; element < count; element++)
            for (int block = 0; block < 2; block++)
                for (int piece = 0; piece < lengths[block]; piece++) {
                    int at = element * (int)(extent / 4) + (outer_at[block] + piece) * (int)(inner_extent / 4);
                    for (int i = 0; i < 3; i++) expected[at + i] = next++;
                    expected[at + 14] = next++;
                }
        MPI_Recv(got, count, outer, 0, 5, WORLD, MPI_STATUS_IGNORE);
        expect(!memcmp(got, expected, room * sizeof *got), "an indexed type of an indexed one");
        free(got);
        free(expected);
    }
    MPI_Type_free(&inner);
    MPI_Type_free(&outer);
}

/* What lies in the hole of a struct stays as it was. */
static void struct_with_a_hole(int count) {
    int lengths[] = {1, 1}, next = (rank + 1) % ranks, before = (rank + ranks - 1) % ranks, right = 1;
    MPI_Aint at[] = {offsetof(struct holed, small), offsetof(struct holed, large)};
    MPI_Datatype parts[] = {MPI_INT32_T, MPI_UINT64_T}, bare, type;
    MPI_Type_create_struct(2, lengths, at, parts, &bare);
    MPI_Type_create_resized(bare, 0, sizeof(struct holed), &type);
    MPI_Type_commit(&type);
    struct holed *sent = calloc(count, sizeof *sent), *got = malloc(count * sizeof *got);
    memset(got, 0x55, count * sizeof *got);
    for (int i = 0; i < count; i++) sent[i] = (struct holed){i ^ rank, (uint64_t)i << 33 | rank};
    MPI_Sendrecv(sent, count, type, next, 6, got, count, type, before, 6, WORLD, MPI_STATUS_IGNORE);
    for (int i = 0; i < count; i++) {
        uint32_t hole;
        memcpy(&hole, (char *)&got[i] + 4, 4);
        right &= got[i].small == (i ^ before) && got[i].large == ((uint64_t)i << 33 | before) && hole == 0x55555555;
    }
    expect(right, "a struct with a hole");
    MPI_Type_free(&bare);
    MPI_Type_free(&type);
    free(sent);
    free(got);
}

/* The insides of grids with a rim, gathered as parts of one grid. */
static void gather_without_rims(int width, int height, int rim) {
    int whole[] = {height + 2 * rim, width + 2 * rim}, inside[] = {height, width}, at[] = {rim, rim}, right = 1;
    int all[] = {height * ranks, width}, cells = whole[0] * whole[1], count = 0;
    MPI_Datatype mine, *theirs = malloc(ranks * sizeof *theirs);
    MPI_Type_create_subarray(2, whole, inside, at, MPI_ORDER_C, MPI_DOUBLE, &mine);
    MPI_Type_commit(&mine);
    double *grid = malloc(cells * sizeof *grid), *gathered = calloc((size_t)all[0] * width, sizeof *gathered);
    for (int i = 0; i < cells; i++) {
        int y = i / whole[1] - rim, x = i % whole[1] - rim;
        grid[i] = x < 0 || y < 0 || x >= width || y >= height ? -7 : rank * 1e6 + y * width + x;
    }
    MPI_Request *requests = malloc((ranks + 1) * sizeof *requests);
    for (int from = 0; rank == 0 && from < ranks; from++) {
        int part_at[] = {height * from, 0};
        MPI_Type_create_subarray(2, all, inside, part_at, MPI_ORDER_C, MPI_DOUBLE, &theirs[from]);
        MPI_Type_commit(&theirs[from]);
        MPI_Irecv(gathered, 1, theirs[from], from, 9, WORLD, &requests[count++]);
    }
    MPI_Isend(grid, 1, mine, 0, 9, WORLD, &requests[count++]);
    MPI_Waitall(count, requests, MPI_STATUSES_IGNORE);
    for (int i = 0; rank == 0 && i < all[0] * width; i++)
        right &= gathered[i] == i / (width * height) * 1e6 + i % (width * height);
    expect(right, "a gather of insides");
    for (int from = 0; rank == 0 && from < ranks; from++) MPI_Type_free(&theirs[from]);
    MPI_Type_free(&mine);
    free(theirs);
    free(grid);
    free(gathered);
    free(requests);
}

int main(int count, char **arguments) {
    begin(&count, &arguments);
    int pieces[] = {1, 2, 16, 255, 4097}, structs[] = {1, 17402, 17403, 20705, 262145};
    for (int i = 0; i < 5; i++) indexed_of_indexed(pieces[i]);
    for (int i = 0; i < 5; i++) struct_with_a_hole(structs[i]);
    gather_without_rims(64, 64, 2);
    gather_without_rims(256, 128, 2);
    gather_without_rims(512, 512, 3);
    return end();
}
