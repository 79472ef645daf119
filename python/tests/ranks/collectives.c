/* Collective calls in place, with nothing from some ranks, of operations that do not commute, many at once, and between groups: pmodels/mpich#5437,
 * #5372, mpi4py/mpi4py#8, open-mpi/ompi's alltoallv_validation. */
#include "check.h"

static int sum_of_ranks(void) { return ranks * (ranks - 1) / 2; }

static void in_place(int count) {
    int *numbers = malloc(sizeof *numbers * (count * ranks + 1)), all = count * ranks, right = 1, last = ranks - 1;
    for (int i = 0; i < count; i++) numbers[i] = rank + i;
    MPI_Allreduce(MPI_IN_PLACE, numbers, count, MPI_INT, MPI_SUM, WORLD);
    for (int i = 0; i < count; i++) right &= numbers[i] == sum_of_ranks() + ranks * i;
    expect(right, "an all-reduce in place");
    for (int i = 0; i < count; i++) numbers[i] = rank + i;
    MPI_Reduce(rank == last ? MPI_IN_PLACE : numbers, numbers, count, MPI_INT, MPI_MAX, last, WORLD);
    for (int i = 0; rank == last && i < count; i++) right &= numbers[i] == last + i;
    expect(right, "a reduce in place");
    for (int i = 0; i < count; i++) numbers[rank * count + i] = rank * count + i;
    MPI_Allgather(MPI_IN_PLACE, 0, MPI_DATATYPE_NULL, numbers, count, MPI_INT, WORLD);
    for (int i = 0; i < all; i++) right &= numbers[i] == i;
    expect(right, "an all-gather in place");
    for (int i = 0; i < all; i++) numbers[i] = rank * 1000 + i;
    MPI_Alltoall(MPI_IN_PLACE, 0, MPI_DATATYPE_NULL, numbers, count, MPI_INT, WORLD);
    for (int i = 0; i < all; i++) right &= numbers[i] == i / count * 1000 + rank * count + i % count;
    expect(right, "an all-to-all in place");
    for (int i = 0; i < all; i++) numbers[i] = rank + i;
    MPI_Reduce_scatter_block(MPI_IN_PLACE, numbers, count, MPI_INT, MPI_SUM, WORLD);
    for (int i = 0; i < count; i++) right &= numbers[i] == sum_of_ranks() + ranks * (rank * count + i);
    expect(right, "a reduce-scatter in place");
    for (int i = 0; i < count; i++) numbers[i] = rank + i;
    MPI_Scan(MPI_IN_PLACE, numbers, count, MPI_INT, MPI_SUM, WORLD);
    for (int i = 0; i < count; i++) right &= numbers[i] == rank * (rank + 1) / 2 + (rank + 1) * i;
    expect(right, "a scan in place");
    for (int i = 0; i < count; i++) numbers[i] = rank + i;
    MPI_Exscan(MPI_IN_PLACE, numbers, count, MPI_INT, MPI_SUM, WORLD);
    for (int i = 0; rank > 0 && i < count; i++) right &= numbers[i] == rank * (rank - 1) / 2 + rank * i;
    expect(right, "an exclusive scan in place");
    for (int i = 0; i < all; i++) numbers[i] = i;
    if (rank == 0)
        MPI_Scatter(numbers, count, MPI_INT, MPI_IN_PLACE, 0, MPI_DATATYPE_NULL, 0, WORLD);
    else
        MPI_Scatter(NULL, 0, MPI_DATATYPE_NULL, numbers, count, MPI_INT, 0, WORLD);
    for (int i = 0; i < count; i++) right &= numbers[i] == rank * count + i;
    expect(right, "a scatter in place");
    free(numbers);
}

/* What one rank sends to another: nothing from some, and from the others ever more. */
static int between(int from, int to, int unit) { return (from * 3 + to) % 3 == 0 ? 0 : (from + 1) * (to + 2) * unit; }
static int sent(int from, int to, int i) { return from * 1000000 + to * 10000 + i % 9999; }

static void uneven_all_to_all(int unit) {
    int counts[2][ranks], at[2][ranks], bytes_at[2][ranks], sizes[2] = {0, 0}, right = 1;
    MPI_Datatype types[ranks];
    MPI_Request request;
    for (int peer = 0; peer < ranks; peer++) {
        types[peer] = MPI_INT;
        for (int way = 0; way < 2; way++) {
            counts[way][peer] = way == 0 ? between(rank, peer, unit) : between(peer, rank, unit);
            at[way][peer] = sizes[way];
            bytes_at[way][peer] = sizes[way] * (int)sizeof(int);
            sizes[way] += counts[way][peer] + 5;
        }
    }
    int *out = malloc(sizes[0] * sizeof *out), *in = malloc(sizes[1] * sizeof *in);
    for (int to = 0; to < ranks; to++)
        for (int i = 0; i < counts[0][to]; i++) out[at[0][to] + i] = sent(rank, to, i);
    for (int again = 0; again < 2; again++) {
        for (int i = 0; i < sizes[1]; i++) in[i] = -1;
        if (again == 0)
            MPI_Alltoallv(out, counts[0], at[0], MPI_INT, in, counts[1], at[1], MPI_INT, WORLD);
        else {
            MPI_Ialltoallw(out, counts[0], bytes_at[0], types, in, counts[1], bytes_at[1], types, WORLD, &request);
            MPI_Wait(&request, MPI_STATUS_IGNORE);
        }
        for (int from = 0; from < ranks; from++)
            for (int i = 0; i < counts[1][from] + 5; i++)
                right &= in[at[1][from] + i] == (i < counts[1][from] ? sent(from, rank, i) : -1);
        expect(right, "an uneven all-to-all");
    }
    free(out);
    free(in);
}

/* Rank 1 has nothing, the others ever more. */
static void uneven(int unit) {
    int counts[ranks], at[ranks], all = 0, right = 1;
    for (int peer = 0; peer < ranks; peer++) {
        counts[peer] = peer == 1 ? 0 : (peer + 1) * unit;
        at[peer] = all;
        all += counts[peer];
    }
    int mine = counts[rank], *own = malloc((mine + 1) * sizeof *own), *gathered = malloc(all * sizeof *gathered);
    for (int i = 0; i < mine; i++) own[i] = rank * 100 + i % 100;
    for (int root = 0; root <= ranks; root++) {
        memset(gathered, 0xff, all * sizeof *gathered);
        if (root == ranks)
            MPI_Allgatherv(own, mine, MPI_INT, gathered, counts, at, MPI_INT, WORLD);
        else
            MPI_Gatherv(own, mine, MPI_INT, gathered, counts, at, MPI_INT, root, WORLD);
        for (int peer = 0; (rank == root || root == ranks) && peer < ranks; peer++)
            for (int i = 0; i < counts[peer]; i++) right &= gathered[at[peer] + i] == peer * 100 + i % 100;
        expect(right, "an uneven gather");
        if (root == ranks) break;
        memset(own, 0, mine * sizeof *own);
        MPI_Scatterv(gathered, counts, at, MPI_INT, own, mine, MPI_INT, root, WORLD);
        for (int i = 0; i < mine; i++) right &= own[i] == rank * 100 + i % 100;
        expect(right, "an uneven scatter");
    }
    MPI_Reduce_scatter(gathered, own, counts, MPI_INT, MPI_SUM, WORLD);
    for (int i = 0; i < mine; i++) right &= own[i] == ranks * (rank * 100 + i % 100);
    expect(right, "an uneven reduce-scatter");
    MPI_Allreduce(NULL, NULL, 0, MPI_INT, MPI_SUM, WORLD);
    MPI_Bcast(NULL, 0, MPI_INT, 0, WORLD);
    free(own);
    free(gathered);
}

typedef struct {
    double at[4];
} Matrix;

static Matrix product(Matrix a, Matrix b) {
    return (Matrix){{a.at[0] * b.at[0] + a.at[1] * b.at[2], a.at[0] * b.at[1] + a.at[1] * b.at[3],
                     a.at[2] * b.at[0] + a.at[3] * b.at[2], a.at[2] * b.at[1] + a.at[3] * b.at[3]}};
}

static void products(void *left, void *right, int *count, MPI_Datatype *type) {
    (void)type;
    for (int i = 0; i < *count; i++) ((Matrix *)right)[i] = product(((Matrix *)left)[i], ((Matrix *)right)[i]);
}

static Matrix matrix_of(int of, int i) { return (Matrix){{1, of + 1 + i % 3, of % 2, 1 + (of == 2)}}; }

static void operations(int count) {
    MPI_Op operation;
    MPI_Datatype type;
    MPI_Type_contiguous(4, MPI_DOUBLE, &type);
    MPI_Type_commit(&type);
    MPI_Op_create(products, 0, &operation);
    Matrix *own = malloc(count * sizeof *own), *reduced = malloc(count * sizeof *reduced);
    int right = 1;
    for (int i = 0; i < count; i++) own[i] = matrix_of(rank, i);
    MPI_Allreduce(own, reduced, count, type, operation, WORLD);
    for (int i = 0; i < count; i++) {
        Matrix expected = {{1, 0, 0, 1}};
        for (int of = 0; of < ranks; of++) expected = product(expected, matrix_of(of, i));
        right &= !memcmp(&expected, &reduced[i], sizeof expected);
    }
    expect(right, "an operation that does not commute");
    struct {
        double value;
        int of;
    } least = {rank == ranks / 2 ? -5.5 : rank, rank};
    MPI_Allreduce(MPI_IN_PLACE, &least, 1, MPI_DOUBLE_INT, MPI_MINLOC, WORLD);
    expect(least.value == -5.5 && least.of == ranks / 2, "the place of the least");
    long double wide = 1.25L * (rank + 1);
    MPI_Allreduce(MPI_IN_PLACE, &wide, 1, MPI_LONG_DOUBLE, MPI_SUM, WORLD);
    expect(wide == 1.25L * ranks * (ranks + 1) / 2, "a sum of long doubles");
    MPI_Op_free(&operation);
    MPI_Type_free(&type);
    free(own);
    free(reduced);
}

static void neighbours_and_persistent(void) {
    int periodic = 1, out[] = {rank * 2, rank * 2 + 1}, in[] = {-1, -1};
    MPI_Comm ring;
    MPI_Cart_create(WORLD, 1, &ranks, &periodic, 0, &ring);
    MPI_Neighbor_alltoall(out, 1, MPI_INT, in, 1, MPI_INT, ring);
    int before = (rank + ranks - 1) % ranks, next = (rank + 1) % ranks;
    expect(in[0] == before * 2 + 1 && in[1] == next * 2, "an all-to-all of neighbours");
    MPI_Comm_free(&ring);
#if MPI_VERSION >= 4
    enum { NUMBERS = 1000000 };
    static int numbers[NUMBERS];
    int own, all;
    MPI_Request request;
    MPI_Allreduce_init(&own, &all, 1, MPI_INT, MPI_SUM, WORLD, MPI_INFO_NULL, &request);
    for (int i = 0; i < 100; i++) {
        own = rank + i;
        MPI_Start(&request);
        MPI_Wait(&request, MPI_STATUS_IGNORE);
        expect(all == sum_of_ranks() + ranks * i, "a persistent all-reduce");
    }
    MPI_Request_free(&request);
    MPI_Bcast_init(numbers, NUMBERS, MPI_INT, ranks - 1, WORLD, MPI_INFO_NULL, &request);
    for (int i = 0; i < 3; i++) {
        for (int k = 0; rank == ranks - 1 && k < NUMBERS; k++) numbers[k] = k + i;
        MPI_Start(&request);
        MPI_Wait(&request, MPI_STATUS_IGNORE);
        expect(numbers[0] == i && numbers[NUMBERS - 1] == NUMBERS - 1 + i, "a persistent broadcast");
        MPI_Barrier(WORLD);
    }
    MPI_Request_free(&request);
#endif
}

static void between_groups(void) {
    int first = (ranks + 1) / 2, is_lower = rank < first, own = rank + 1, theirs = 0, expected = 0, place, number = 0, one = 1;
    MPI_Comm half, both, merged;
    MPI_Comm_split(WORLD, is_lower, rank, &half);
    MPI_Intercomm_create(half, 0, WORLD, is_lower ? first : 0, 5, &both);
    MPI_Allreduce(&own, &theirs, 1, MPI_INT, MPI_SUM, both);
    for (int peer = 0; peer < ranks; peer++) expected += (peer < first) != is_lower ? peer + 1 : 0;
    expect(theirs == expected, "an all-reduce between groups");
    MPI_Comm_rank(half, &place);
    if (is_lower) number = 77;
    MPI_Bcast(&number, 1, MPI_INT, is_lower ? (place == 0 ? MPI_ROOT : MPI_PROC_NULL) : 0, both);
    expect(number == 77, "a broadcast between groups");
    MPI_Intercomm_merge(both, !is_lower, &merged);
    MPI_Allreduce(MPI_IN_PLACE, &one, 1, MPI_INT, MPI_SUM, merged);
    expect(one == ranks, "groups that are merged");
    MPI_Comm_free(&merged);
    MPI_Comm_free(&both);
    MPI_Comm_free(&half);
}

/* Three kinds by turns, begun all at once and waited for from the last one on; then many communicators. */
static void many(void) {
    enum { COUNT = 300, COMMUNICATORS = 200 };
    MPI_Request requests[COUNT];
    int own[COUNT], all[COUNT], right = 1;
    for (int i = 0; i < COUNT; i++) {
        own[i] = rank + i;
        all[i] = rank == i % ranks ? i : -1;
        if (i % 3 == 0) MPI_Iallreduce(&own[i], &all[i], 1, MPI_INT, MPI_SUM, WORLD, &requests[i]);
        if (i % 3 == 1) MPI_Ibcast(&all[i], 1, MPI_INT, i % ranks, WORLD, &requests[i]);
        if (i % 3 == 2) MPI_Ibarrier(WORLD, &requests[i]);
    }
    for (int i = COUNT - 1; i >= 0; i--) MPI_Wait(&requests[i], MPI_STATUS_IGNORE);
    for (int i = 0; i < COUNT; i++) right &= i % 3 == 2 || all[i] == (i % 3 == 0 ? sum_of_ranks() + ranks * i : i);
    expect(right, "one of many calls at once");
    for (int i = 0; i < COMMUNICATORS; i++) {
        MPI_Comm some;
        int count, one = 1;
        MPI_Comm_split(WORLD, i % 7 == 0 ? rank % 2 : 0, -rank, &some);
        MPI_Comm_size(some, &count);
        MPI_Allreduce(MPI_IN_PLACE, &one, 1, MPI_INT, MPI_SUM, some);
        expect(one == count, "one of many communicators");
        MPI_Comm_free(&some);
    }
}

int main(int count, char **arguments) {
    begin(&count, &arguments);
    int counts[] = {0, 1, 7, 5000, 100000}, units[] = {1, 700, 10000};
    for (int i = 0; i < 5; i++) in_place(counts[i]);
    for (int i = 0; i < 3; i++) uneven_all_to_all(units[i]), uneven(units[i]);
    operations(1);
    operations(3000);
    neighbours_and_persistent();
    between_groups();
    many();
    return end();
}
