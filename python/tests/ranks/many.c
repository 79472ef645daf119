/* What many ranks do: everybody sends to everybody, sums, exchanges halos of a grid, and puts into windows. Every value is checked. The
 * last lines say what the pool's file takes of memory, and how long the first exchange of all with all took. */
#include <sys/stat.h>
#include <time.h>

#include "check.h"

/* Bytes of the pool's file that are there. */
static double used_mib(void) {
    struct stat file;
    const char *pool = getenv("POLDER_POOL");
    return pool && stat(pool, &file) == 0 ? file.st_blocks * 512.0 / (1 << 20) : 0;
}

static double now(void) {
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return at.tv_sec + at.tv_nsec / 1e9;
}

static void say(const char *what) {
    MPI_Barrier(WORLD);
    if (rank == 0) printf("%s: the pool has %.1f MiB\n", what, used_mib());
    fflush(stdout);
}

/* Everybody sends to everybody, so many words. */
static void all_to_all(int words) {
    long *out = malloc(sizeof(long) * words * ranks), *in = malloc(sizeof(long) * words * ranks);
    for (int at = 0; at < words * ranks; at++) out[at] = rank * 1000003L + at;
    MPI_Alltoall(out, words, MPI_LONG, in, words, MPI_LONG, WORLD);
    int right = 1;
    for (int from = 0; from < ranks; from++) {
        for (int at = 0; at < words; at++) right &= in[from * words + at] == from * 1000003L + rank * words + at;
    }
    expect(right, "an all-to-all");
    free(out);
    free(in);
}

static void all_reduce(int count) {
    double *values = malloc(sizeof(double) * count);
    for (int at = 0; at < count; at++) values[at] = rank + at;
    MPI_Allreduce(MPI_IN_PLACE, values, count, MPI_DOUBLE, MPI_SUM, WORLD);
    int right = 1;
    for (int at = 0; at < count; at++) right &= values[at] == ranks * (ranks - 1) / 2.0 + (double)ranks * at;
    expect(right, "an all-reduce");
    free(values);
}

enum { SIDE = 96, STEPS = 5 };

/* A grid with a halo, whose cells say where they are and in which step. */
static double grid[SIDE + 2][SIDE + 2];

static double cell(const int place[2], const int dims[2], int row, int column, int step) {
    int rows = dims[0] * SIDE, columns = dims[1] * SIDE;
    int y = (place[0] * SIDE + row + rows) % rows, x = (place[1] * SIDE + column + columns) % columns;
    return step * 1e7 + y * 2000.0 + x;
}

static void halos(void) {
    int dims[2] = {0, 0}, periods[2] = {1, 1}, place[2], up, down, left, right;
    MPI_Comm torus;
    MPI_Datatype column;
    MPI_Dims_create(ranks, 2, dims);
    MPI_Cart_create(WORLD, 2, dims, periods, 1, &torus);
    int mine;
    MPI_Comm_rank(torus, &mine);
    MPI_Cart_coords(torus, mine, 2, place);
    MPI_Cart_shift(torus, 0, 1, &up, &down);
    MPI_Cart_shift(torus, 1, 1, &left, &right);
    MPI_Type_vector(SIDE, 1, SIDE + 2, MPI_DOUBLE, &column);
    MPI_Type_commit(&column);
    for (int step = 0; step < STEPS; step++) {
        for (int y = 0; y < SIDE; y++) {
            for (int x = 0; x < SIDE; x++) grid[y + 1][x + 1] = cell(place, dims, y, x, step);
        }
        MPI_Request under_way[8];
        MPI_Irecv(&grid[0][1], SIDE, MPI_DOUBLE, up, 1, torus, &under_way[0]);
        MPI_Irecv(&grid[SIDE + 1][1], SIDE, MPI_DOUBLE, down, 2, torus, &under_way[1]);
        MPI_Irecv(&grid[1][0], 1, column, left, 3, torus, &under_way[2]);
        MPI_Irecv(&grid[1][SIDE + 1], 1, column, right, 4, torus, &under_way[3]);
        MPI_Isend(&grid[SIDE][1], SIDE, MPI_DOUBLE, down, 1, torus, &under_way[4]);
        MPI_Isend(&grid[1][1], SIDE, MPI_DOUBLE, up, 2, torus, &under_way[5]);
        MPI_Isend(&grid[1][SIDE], 1, column, right, 3, torus, &under_way[6]);
        MPI_Isend(&grid[1][1], 1, column, left, 4, torus, &under_way[7]);
        MPI_Waitall(8, under_way, MPI_STATUSES_IGNORE);
        int is_right = 1;
        for (int at = 0; at < SIDE; at++) {
            is_right &= grid[0][at + 1] == cell(place, dims, -1, at, step);
            is_right &= grid[SIDE + 1][at + 1] == cell(place, dims, SIDE, at, step);
            is_right &= grid[at + 1][0] == cell(place, dims, at, -1, step);
            is_right &= grid[at + 1][SIDE + 1] == cell(place, dims, at, SIDE, step);
        }
        expect(is_right, "a halo");
    }
    MPI_Type_free(&column);
    MPI_Comm_free(&torus);
}

/* Everybody puts to everybody, and counts under a lock and without one. */
static void windows(int is_own) {
    long *memory, *mine = calloc(ranks, sizeof(long)), counted = 0, one = 1;
    MPI_Win puts, counter;
    if (is_own) {
        memory = malloc(sizeof(long) * ranks);
        MPI_Win_create(memory, sizeof(long) * ranks, sizeof(long), MPI_INFO_NULL, WORLD, &puts);
    } else {
        MPI_Win_allocate(sizeof(long) * ranks, sizeof(long), MPI_INFO_NULL, WORLD, &memory, &puts);
    }
    for (int step = 0; step < STEPS; step++) {
        for (int at = 0; at < ranks; at++) mine[at] = step * 1000000L + rank * 1000L + at;
        MPI_Win_fence(0, puts);
        for (int at = 0; at < ranks; at++) {
            int to = (rank + at) % ranks;
            MPI_Put(&mine[to], 1, MPI_LONG, to, rank, 1, MPI_LONG, puts);
        }
        MPI_Win_fence(0, puts);
        int right = 1;
        for (int from = 0; from < ranks; from++) right &= memory[from] == step * 1000000L + from * 1000L + rank;
        expect(right, "what everybody has put");
    }
    long *tally, got, more;
    MPI_Win_allocate(2 * sizeof(long), sizeof(long), MPI_INFO_NULL, WORLD, &tally, &counter);
    MPI_Win_lock(MPI_LOCK_EXCLUSIVE, rank, 0, counter);
    tally[0] = tally[1] = 0;
    MPI_Win_unlock(rank, counter);
    MPI_Barrier(WORLD);
    for (int step = 0; step < STEPS; step++) {
        MPI_Win_lock(MPI_LOCK_EXCLUSIVE, 0, 0, counter);
        MPI_Get(&got, 1, MPI_LONG, 0, 0, 1, MPI_LONG, counter);
        MPI_Win_flush(0, counter);
        more = got + 1;
        MPI_Put(&more, 1, MPI_LONG, 0, 0, 1, MPI_LONG, counter);
        MPI_Win_unlock(0, counter);
        MPI_Win_lock(MPI_LOCK_SHARED, 0, 0, counter);
        MPI_Fetch_and_op(&one, &counted, MPI_LONG, 0, 1, MPI_SUM, counter);
        MPI_Win_unlock(0, counter);
    }
    MPI_Barrier(WORLD);
    MPI_Win_lock(MPI_LOCK_SHARED, rank, 0, counter);
    if (rank == 0) expect(tally[0] == (long)ranks * STEPS && tally[1] == tally[0], "what everybody has counted");
    MPI_Win_unlock(rank, counter);
    MPI_Win_free(&counter);
    MPI_Win_free(&puts);
    if (is_own) free(memory);
    free(mine);
}

/* Communicators of the ranks of a host, which POLDER_HOST names, and many more. */
static void communicators(int count) {
    const char *said = getenv("POLDER_HOST");
    int host = said ? atoi(said) : 0, *hosts = malloc(sizeof(int) * ranks), in_host = 0, sharing;
    MPI_Allgather(&host, 1, MPI_INT, hosts, 1, MPI_INT, WORLD);
    for (int at = 0; at < ranks; at++) in_host += hosts[at] == host;
    MPI_Comm share;
    MPI_Comm_split_type(WORLD, MPI_COMM_TYPE_SHARED, rank, MPI_INFO_NULL, &share);
    MPI_Comm_size(share, &sharing);
    expect(sharing == in_host || !getenv("POLDER_POOL"), "the number of ranks that share memory");
    MPI_Comm_free(&share);
    MPI_Comm_split_type(WORLD, rank % 2 ? MPI_COMM_TYPE_SHARED : MPI_UNDEFINED, 0, MPI_INFO_NULL, &share);
    expect((share == MPI_COMM_NULL) == (rank % 2 == 0), "a communicator that some want no part of");
    if (share != MPI_COMM_NULL) MPI_Comm_free(&share);
    free(hosts);
    for (int at = 0; at < count; at++) {
        MPI_Comm part;
        int in_part, sum = 1;
        MPI_Comm_split(WORLD, (rank + at) % 3, -rank, &part);
        MPI_Comm_size(part, &in_part);
        MPI_Allreduce(MPI_IN_PLACE, &sum, 1, MPI_INT, MPI_SUM, part);
        expect(sum == in_part, "a communicator");
        MPI_Comm_free(&part);
    }
}

int main(int count, char **arguments) {
    begin(&count, &arguments);
    say("begun");
    double since = now();
    all_to_all(8);
    MPI_Barrier(WORLD);
    if (rank == 0) printf("the first all-to-all took %.3f s\n", now() - since);
    say("all-to-all of 64 B");
    all_to_all(512);
    all_to_all(8192);
    say("all-to-all of 4 and 64 KiB");
    all_reduce(1);
    all_reduce(100000);
    say("all-reduce");
    halos();
    say("halos");
    windows(0);
    windows(1);
    say("windows");
    communicators(count > 1 ? atoi(arguments[1]) : 20);
    say("communicators");
    return end();
}
