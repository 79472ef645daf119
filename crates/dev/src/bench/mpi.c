/* One rank of `polder bench mpi`, which compiles it with the library's own mpicc. Each argument is a case, CASE:BYTES; rank 0
 * prints "CASE:BYTES SECONDS" for each: how long a message of it takes, or an iteration. The first half of the ranks are
 * origins, each with a target in the other half. */
#define _POSIX_C_SOURCE 200112L
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static int rank, size, partner, is_origin, bytes;
static char *out, *in;
static MPI_Win window;

/* So long an operation is repeated at least, after about as long that does not count. */
static const double SECONDS = 0.1;

/* Messages in flight, as many as osu_bw has of short ones. */
static int in_flight(void) { return bytes <= 1 << 17 ? 64 : bytes <= 1 << 20 ? 16 : 4; }

/* Each operation says how many messages or iterations it was. */
static int latency(void) {
    if (is_origin) {
        MPI_Send(out, bytes, MPI_CHAR, partner, 1, MPI_COMM_WORLD);
        MPI_Recv(in, bytes, MPI_CHAR, partner, 1, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
    } else {
        MPI_Recv(in, bytes, MPI_CHAR, partner, 1, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
        MPI_Send(out, bytes, MPI_CHAR, partner, 1, MPI_COMM_WORLD);
    }
    return 2;
}

static int stream(void) {
    MPI_Request requests[64];
    int count = in_flight();
    for (int i = 0; i < count; i++)
        if (is_origin)
            MPI_Isend(out, bytes, MPI_CHAR, partner, 2, MPI_COMM_WORLD, &requests[i]);
        else
            MPI_Irecv(in, bytes, MPI_CHAR, partner, 2, MPI_COMM_WORLD, &requests[i]);
    MPI_Waitall(count, requests, MPI_STATUSES_IGNORE);
    if (is_origin)
        MPI_Recv(in, 1, MPI_CHAR, partner, 3, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
    else
        MPI_Send(out, 1, MPI_CHAR, partner, 3, MPI_COMM_WORLD);
    return count;
}

static int puts_and_flush(int count) {
    for (int i = 0; is_origin && i < count; i++)
        MPI_Put(out, bytes, MPI_CHAR, partner, 0, bytes, MPI_CHAR, window);
    if (is_origin) MPI_Win_flush(partner, window);
    return count;
}

static int put(void) { return puts_and_flush(1); }

static int put_stream(void) { return puts_and_flush(in_flight()); }

/* An iteration of conjugate gradients: the halo goes to both neighbours, then two dot products. */
static int halo(void) {
    MPI_Request requests[4];
    int right = (rank + 1) % size, left = (rank + size - 1) % size;
    MPI_Irecv(in, bytes, MPI_CHAR, left, 4, MPI_COMM_WORLD, &requests[0]);
    MPI_Irecv(in + bytes, bytes, MPI_CHAR, right, 5, MPI_COMM_WORLD, &requests[1]);
    MPI_Isend(out, bytes, MPI_CHAR, right, 4, MPI_COMM_WORLD, &requests[2]);
    MPI_Isend(out + bytes, bytes, MPI_CHAR, left, 5, MPI_COMM_WORLD, &requests[3]);
    MPI_Waitall(4, requests, MPI_STATUSES_IGNORE);
    for (int product = 0; product < 2; product++) {
        double mine = rank, sum;
        MPI_Allreduce(&mine, &sum, 1, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD);
        if (sum != size * (size - 1) / 2.0) MPI_Abort(MPI_COMM_WORLD, 1);
    }
    return 1;
}

static int alltoall(void) {
    MPI_Alltoall(out, bytes, MPI_CHAR, in, bytes, MPI_CHAR, MPI_COMM_WORLD);
    return 1;
}

static const struct {
    const char *name;
    int (*operation)(void);
    /* To whom the same bytes come as they send: to everybody, or to targets alone. */
    int one_way, has_window;
} CASES[] = {
    {"latency", latency, 0, 0}, {"stream", stream, 1, 0}, {"put", put, 1, 1},
    {"put-stream", put_stream, 1, 1}, {"halo", halo, 0, 0}, {"alltoall", alltoall, 0, 0},
};

/* Seconds on the clock that all ranks of a machine have in common, which MPI_Wtime need not be. */
static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec + time.tv_nsec / 1e9;
}

/* Seconds of so many operations, from when the first rank begins until the last is done with `messages` of them. The barriers
 * do not count: where many ranks share a core one takes longer than what is measured. */
static double timed(int (*operation)(void), long count, long *messages) {
    MPI_Barrier(MPI_COMM_WORLD);
    double times[2] = {-now(), 0}, last[2];
    *messages = 0;
    for (long i = 0; i < count; i++) *messages += operation();
    times[1] = now();
    MPI_Allreduce(times, last, 2, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
    return last[0] + last[1];
}

static double measure(int (*operation)(void)) {
    long count = 1, messages;
    double seconds;
    /* The first few meet their peers. */
    timed(operation, 4, &messages);
    while ((seconds = timed(operation, count, &messages)) < SECONDS) count *= 2;
    return seconds / messages;
}

static void run(const char *word) {
    const char *colon = strchr(word, ':');
    unsigned number = 0, cases = sizeof CASES / sizeof *CASES;
    size_t length = colon ? (size_t)(colon - word) : 0;
    while (number < cases && (strlen(CASES[number].name) != length || strncmp(CASES[number].name, word, length))) number++;
    if (number == cases) {
        fprintf(stderr, "%s is no case\n", word);
        MPI_Abort(MPI_COMM_WORLD, 2);
    }
    bytes = atoi(colon + 1);
    /* An all-to-all has a part for each rank, a halo two: 32 ranks with long messages would fill a machine. */
    int parts = CASES[number].operation == alltoall ? size : 2;
    out = calloc(parts, bytes), in = calloc(parts, bytes);
    for (int i = 0; i < parts * bytes; i++) out[i] = (char)(i % bytes % 251);
    char *came = in;
    if (CASES[number].has_window) {
        MPI_Win_allocate(bytes, 1, MPI_INFO_NULL, MPI_COMM_WORLD, &came, &window);
        MPI_Win_lock_all(0, window);
    }
    double seconds = measure(CASES[number].operation);
    if (CASES[number].has_window) MPI_Win_sync(window);
    if (!(CASES[number].one_way && is_origin) && memcmp(came, out, bytes)) {
        fprintf(stderr, "%s: rank %d got other bytes than were sent\n", word, rank);
        MPI_Abort(MPI_COMM_WORLD, 3);
    }
    if (CASES[number].has_window) {
        MPI_Win_unlock_all(window);
        MPI_Win_free(&window);
    }
    if (rank == 0) printf("%s %.9g\n", word, seconds);
    free(out), free(in);
}

int main(int argc, char **argv) {
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    int half = size / 2;
    is_origin = rank < half;
    partner = is_origin ? rank + half : rank - half;
    for (int i = 1; i < argc; i++) run(argv[i]);
    MPI_Finalize();
    return 0;
}
