/* Messages between two ranks in odd orders: unreceived ones do not block others (ofiwg/libfabric#9853), many unexpected ones (#9143), cancelled
 * receives (pmodels/mpich#5775, open-mpi/ompi#8078), receives that are too short (#89, #2484), requests that are freed (#6584), to oneself. */
#include "check.h"

static int other;

/* A message that finds no receive yet holds back none with another tag. */
static void unreceived(int bytes) {
    char *blocked = calloc(1, bytes);
    long sent[] = {1, 2}, got[] = {0, 0}, turn = 0;
    MPI_Request requests[3];
    if (rank == 0) {
        MPI_Isend(&sent[0], 1, MPI_LONG, 1, 0, WORLD, &requests[0]);
        MPI_Isend(blocked, bytes, MPI_BYTE, 1, 1, WORLD, &requests[1]);
        MPI_Isend(&sent[1], 1, MPI_LONG, 1, 0, WORLD, &requests[2]);
        MPI_Wait(&requests[0], MPI_STATUS_IGNORE);
        MPI_Wait(&requests[2], MPI_STATUS_IGNORE);
        MPI_Recv(&turn, 1, MPI_LONG, 1, 3, WORLD, MPI_STATUS_IGNORE);
        MPI_Send(&turn, 1, MPI_LONG, 1, 4, WORLD);
        MPI_Wait(&requests[1], MPI_STATUS_IGNORE);
    } else {
        for (int i = 0; i < 2; i++) MPI_Irecv(&got[i], 1, MPI_LONG, 0, 0, WORLD, &requests[i]);
        MPI_Waitall(2, requests, MPI_STATUSES_IGNORE);
        expect(got[0] == 1 && got[1] == 2, "the order of messages");
        MPI_Send(&turn, 1, MPI_LONG, 0, 3, WORLD);
        MPI_Recv(&turn, 1, MPI_LONG, 0, 4, WORLD, MPI_STATUS_IGNORE);
        MPI_Recv(blocked, bytes, MPI_BYTE, 0, 1, WORLD, MPI_STATUS_IGNORE);
    }
    free(blocked);
}

/* All are sent before one is received, and they are received from the last one on. */
static void unexpected(int count, int bytes) {
    char *data = malloc((size_t)count * bytes);
    MPI_Request *requests = malloc(count * sizeof *requests);
    int right = 1;
    for (int i = 0; rank == 0 && i < count; i++) {
        memset(data + (size_t)i * bytes, i * 7 + 1, bytes);
        MPI_Isend(data + (size_t)i * bytes, bytes, MPI_BYTE, 1, 100 + i, WORLD, &requests[i]);
    }
    MPI_Barrier(WORLD);
    if (rank == 0) MPI_Waitall(count, requests, MPI_STATUSES_IGNORE);
    for (int i = count - 1; rank == 1 && i >= 0; i--) {
        MPI_Recv(data, bytes, MPI_BYTE, 0, 100 + i, WORLD, MPI_STATUS_IGNORE);
        for (int at = 0; at < bytes; at++) right &= data[at] == (char)(i * 7 + 1);
    }
    expect(right, "a message that was not expected");
    free(data);
    free(requests);
}

/* A receive is cancelled or has its message: never both, and the next receive gets what a cancelled one did not. */
static void cancelled(void) {
    MPI_Request request;
    MPI_Status status;
    int number = 42, is_cancelled;
    MPI_Irecv(&number, 1, MPI_INT, MPI_ANY_SOURCE, 77, WORLD, &request);
    MPI_Cancel(&request);
    MPI_Wait(&request, &status);
    MPI_Test_cancelled(&status, &is_cancelled);
    expect(is_cancelled, "a receive that is cancelled");
    for (int i = 0; i < 200; i++) {
        int first = -1, second = -1;
        MPI_Barrier(WORLD);
        if (rank == 0) {
            MPI_Send(&i, 1, MPI_INT, 1, 78, WORLD);
            continue;
        }
        MPI_Irecv(&first, 1, MPI_INT, 0, 78, WORLD, &request);
        for (volatile int spin = 0; i % 2 && spin < i * 50; spin++) continue;
        MPI_Cancel(&request);
        MPI_Wait(&request, &status);
        MPI_Test_cancelled(&status, &is_cancelled);
        if (is_cancelled) MPI_Recv(&second, 1, MPI_INT, 0, 78, WORLD, MPI_STATUS_IGNORE);
        expect((is_cancelled ? second : first) == i, "a receive that is cancelled in a race");
    }
    MPI_Recv_init(&number, 1, MPI_INT, MPI_ANY_SOURCE, 79, WORLD, &request);
    for (int i = 0; i < 3; i++) {
        MPI_Start(&request);
        MPI_Cancel(&request);
        MPI_Wait(&request, &status);
        MPI_Test_cancelled(&status, &is_cancelled);
        expect(is_cancelled, "a persistent receive that is cancelled");
    }
    MPI_Request_free(&request);
}

/* Every kind of receive that is too short says so, and the next message is whole. */
static void truncated(int bytes) {
    char *data = calloc(1, bytes);
    int kind, at, count, number = rank;
    MPI_Request request;
    MPI_Message message;
    MPI_Status status;
    MPI_Comm_set_errhandler(WORLD, MPI_ERRORS_RETURN);
    for (int tag = 60; rank == 0 && tag < 63; tag++) MPI_Send(data, bytes, MPI_BYTE, 1, tag, WORLD);
    if (rank == 1) {
        MPI_Error_class(MPI_Recv(data, 8, MPI_BYTE, 0, 60, WORLD, &status), &kind);
        expect(kind == MPI_ERR_TRUNCATE, "a receive that is too short");
        MPI_Irecv(data, 8, MPI_BYTE, 0, 61, WORLD, &request);
        MPI_Error_class(MPI_Waitany(1, &request, &at, &status), &kind);
        expect(kind == MPI_ERR_TRUNCATE, "a wait for a receive that is too short");
        MPI_Mprobe(0, 62, WORLD, &message, &status);
        MPI_Get_count(&status, MPI_BYTE, &count);
        expect(count == bytes, "the size that a probe says");
        MPI_Error_class(MPI_Mrecv(data, 8, MPI_BYTE, &message, &status), &kind);
        expect(kind == MPI_ERR_TRUNCATE, "a matched receive that is too short");
    }
    if (rank == 0) MPI_Send(&number, 1, MPI_INT, 1, 63, WORLD);
    if (rank == 1) MPI_Recv(&number, 1, MPI_INT, 0, 63, WORLD, MPI_STATUS_IGNORE);
    expect(number == 0, "the message behind one that was cut");
    MPI_Comm_set_errhandler(WORLD, MPI_ERRORS_ARE_FATAL);
    free(data);
}

/* What is under way goes on when its request is freed. */
static void freed(void) {
    enum { NUMBERS = 1000000 };
    static int numbers[NUMBERS];
    MPI_Request request;
    int seen = 0;
    numbers[NUMBERS - 1] = rank == 0 ? 1 : -1;
    if (rank == 0) {
        MPI_Isend(numbers, NUMBERS, MPI_INT, 1, 50, WORLD, &request);
        MPI_Request_free(&request);
        MPI_Recv(&seen, 1, MPI_INT, 1, 51, WORLD, MPI_STATUS_IGNORE);
    } else {
        MPI_Irecv(numbers, NUMBERS, MPI_INT, 0, 50, WORLD, &request);
        MPI_Request_free(&request);
        while (((volatile int *)numbers)[NUMBERS - 1] == -1) MPI_Iprobe(MPI_ANY_SOURCE, 99, WORLD, &seen, MPI_STATUS_IGNORE);
        MPI_Send(&seen, 1, MPI_INT, 0, 51, WORLD);
    }
    MPI_Barrier(WORLD);
}

/* To oneself, of no bytes, to nobody, and with the largest tag. */
static void odd_ends(void) {
    int sent = 5, got = 0, flag, count, *largest;
    MPI_Request request;
    MPI_Status status;
    MPI_Issend(&sent, 1, MPI_INT, rank, 1, WORLD, &request);
    MPI_Test(&request, &flag, &status);
    expect(!flag, "a synchronous send without a receive");
    MPI_Recv(&got, 1, MPI_INT, rank, 1, WORLD, &status);
    MPI_Wait(&request, &status);
    expect(got == 5, "a message to oneself");
    MPI_Isend(NULL, 0, MPI_INT, rank, 1, WORLD, &request);
    MPI_Probe(rank, 1, WORLD, &status);
    MPI_Get_count(&status, MPI_INT, &count);
    MPI_Recv(NULL, 0, MPI_INT, rank, 1, WORLD, &status);
    MPI_Wait(&request, &status);
    expect(count == 0, "a message of no bytes");
    MPI_Recv(&got, 1, MPI_INT, MPI_PROC_NULL, 1, WORLD, &status);
    expect(status.MPI_SOURCE == MPI_PROC_NULL && status.MPI_TAG == MPI_ANY_TAG, "a message of nobody");
    MPI_Comm_get_attr(WORLD, MPI_TAG_UB, &largest, &flag);
    MPI_Sendrecv(&rank, 1, MPI_INT, other, *largest, &got, 1, MPI_INT, other, *largest, WORLD, &status);
    expect(got == other && status.MPI_TAG == *largest, "the largest tag");
}

/* A column of a matrix against another one of the same memory. */
static void columns(void) {
#if MPI_VERSION >= 4
    enum { SIDE = 300 };
    static int matrix[SIDE][SIDE];
    MPI_Datatype column;
    MPI_Request request;
    int right = 1;
    for (int i = 0; i < SIDE * SIDE; i++) matrix[i / SIDE][i % SIDE] = rank * SIDE * SIDE + i;
    MPI_Type_vector(SIDE, 1, SIDE, MPI_INT, &column);
    MPI_Type_commit(&column);
    MPI_Isendrecv(&matrix[0][SIDE - 2], 1, column, other, 3, &matrix[0][0], 1, column, other, 3, WORLD, &request);
    MPI_Type_free(&column);
    MPI_Wait(&request, MPI_STATUS_IGNORE);
    for (int y = 0; y < SIDE; y++) right &= matrix[y][0] == other * SIDE * SIDE + y * SIDE + SIDE - 2;
    expect(right, "a column");
    for (int i = 0; i < SIDE; i++) matrix[0][i] = rank;
    MPI_Isendrecv_replace(matrix, SIDE, MPI_INT, other, 4, other, 4, WORLD, &request);
    MPI_Wait(&request, MPI_STATUS_IGNORE);
    expect(matrix[0][0] == other && matrix[0][SIDE - 1] == other, "a message that is replaced");
#endif
}

int main(int count, char **arguments) {
    begin(&count, &arguments);
    other = 1 - rank;
    int lengths[] = {8192, 65537, 300000, 3000000}, cut[] = {64, 5000, 400000};
    for (int i = 0; i < 4; i++) unreceived(lengths[i]);
    unexpected(600, 4097);
    unexpected(100, 70000);
    unexpected(12, 1500000);
    cancelled();
    for (int i = 0; i < 3; i++) truncated(cut[i]);
    freed();
    odd_ends();
    columns();
    return end();
}
