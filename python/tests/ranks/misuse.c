/* Calls on windows in every order, right and wrong. One rank prints the class of each error, for two runs to be compared; two ranks
 * check what each call gives.
 * misuse allocate|create [library] */
#include "check.h"

static MPI_Win window;
static MPI_Group self;
static long place[8], item = 7, got;
static int posts, starts, completed;

static int fence(void) { return MPI_Win_fence(0, window); }
static int last_fence(void) { return MPI_Win_fence(MPI_MODE_NOSUCCEED, window); }
static int post(void) { return MPI_Win_post(self, 0, window); }
static int start(void) { return MPI_Win_start(self, 0, window); }
static int complete(void) { return MPI_Win_complete(window); }
static int wait(void) { return MPI_Win_wait(window); }
static int lock(void) { return MPI_Win_lock(MPI_LOCK_EXCLUSIVE, 0, 0, window); }
static int lock_unchecked(void) { return MPI_Win_lock(MPI_LOCK_SHARED, 0, MPI_MODE_NOCHECK, window); }
static int unlock(void) { return MPI_Win_unlock(0, window); }
static int lock_all(void) { return MPI_Win_lock_all(0, window); }
static int unlock_all(void) { return MPI_Win_unlock_all(window); }
static int flush(void) { return MPI_Win_flush(0, window); }
static int flush_all(void) { return MPI_Win_flush_all(window); }
static int flush_local(void) { return MPI_Win_flush_local(0, window); }
static int flush_local_all(void) { return MPI_Win_flush_local_all(window); }
static int sync_copies(void) { return MPI_Win_sync(window); }
static int put(void) { return MPI_Put(&item, 1, MPI_LONG, 0, 1, 1, MPI_LONG, window); }
static int get(void) { return MPI_Get(&got, 1, MPI_LONG, 0, 2, 1, MPI_LONG, window); }
static int add(void) { return MPI_Accumulate(&item, 1, MPI_LONG, 0, 3, 1, MPI_LONG, MPI_SUM, window); }
static int fetch(void) { return MPI_Fetch_and_op(&item, &got, MPI_LONG, 0, 4, MPI_SUM, window); }
static int swap(void) { return MPI_Compare_and_swap(&item, &item, &got, MPI_LONG, 0, 5, window); }
static int put_nowhere(void) { return MPI_Put(&item, 1, MPI_LONG, MPI_PROC_NULL, 1, 1, MPI_LONG, window); }
static int put_too_far(void) { return MPI_Put(&item, 1, MPI_LONG, 5, 1, 1, MPI_LONG, window); }
static int put_asking(void) {
    MPI_Request request;
    int code = MPI_Rput(&item, 1, MPI_LONG, 0, 6, 1, MPI_LONG, window, &request);
    return code ? code : MPI_Wait(&request, MPI_STATUS_IGNORE);
}

/* Each is called where it does not wait for ever: `start` after as many posts, `wait` after as many completed accesses. */
static const struct {
    const char *name;
    int (*call)(void);
} CALLS[] = {
    {"fence", fence}, {"last_fence", last_fence}, {"post", post}, {"start", start}, {"complete", complete},
    {"wait", wait}, {"lock", lock}, {"lock_unchecked", lock_unchecked}, {"unlock", unlock}, {"lock_all", lock_all},
    {"unlock_all", unlock_all}, {"put", put}, {"flush", flush},
    /* As one of those above, so only in pairs and at random. */
    {"get", get}, {"add", add}, {"fetch", fetch}, {"swap", swap}, {"put_asking", put_asking}, {"flush_all", flush_all},
    {"flush_local", flush_local}, {"flush_local_all", flush_local_all}, {"sync", sync_copies},
    {"put_nowhere", put_nowhere}, {"put_too_far", put_too_far},
};
enum { KINDS = 13, ALL = sizeof CALLS / sizeof *CALLS };

static int class_of(int code) {
    int class = MPI_SUCCESS;
    if (code) MPI_Error_class(code, &class);
    return class;
}

static const char *name_of(int class) {
    static char other[16];
    if (class == MPI_SUCCESS) return "right";
    if (class == MPI_ERR_RMA_SYNC) return "sync";
    if (class == MPI_ERR_RANK) return "rank";
    snprintf(other, sizeof other, "%d", class);
    return other;
}

/* The class of a call's error; -1 where it would wait. */
static int called(int which) {
    int (*call)(void) = CALLS[which].call;
    if ((call == start && posts <= starts) || (call == wait && posts != completed)) return -1;
    int class = class_of(call());
    if (class) return class;
    posts += call == post;
    starts += call == start;
    completed += call == complete;
    return class;
}

static void make(const char *how, MPI_Comm comm) {
    void *base = place;
    if (strcmp(how, "allocate")) {
        MPI_Win_create(place, sizeof place, sizeof *place, MPI_INFO_NULL, comm, &window);
    } else {
        MPI_Win_allocate(sizeof place, sizeof *place, MPI_INFO_NULL, comm, &base, &window);
    }
    MPI_Win_set_errhandler(window, MPI_ERRORS_RETURN);
    posts = starts = completed = 0;
}

/* Ends every epoch. */
static void close_all(void) {
    unlock();
    unlock_all();
    if (posts > completed) {
        if (starts == completed) starts += !start();
        completed += !complete();
    }
    wait();
    last_fence();
}

static void sequence(const char *how, const int *calls, int count) {
    make(how, MPI_COMM_SELF);
    for (int at = 0; at < count; at++) {
        int class = called(calls[at]);
        printf("%s %s, ", CALLS[calls[at]].name, class < 0 ? "waits" : name_of(class));
    }
    int class = class_of(MPI_Win_free(&window));
    printf("free %s\n", name_of(class));
    if (!class) return;
    close_all();
    expect(!MPI_Win_free(&window), "free after all epochs have ended");
}

static int handled;
static void handle(MPI_Win *win, int *code, ...) { handled += win != NULL && *code != 0; }

/* What calls return once a handler of the program's own has returned. */
static void with_handler(const char *how) {
    static const struct {
        const char *name;
        int (*call)(void);
    } WRONG[] = {{"put", put}, {"unlock", unlock}, {"complete", complete}};
    make(how, MPI_COMM_SELF);
    MPI_Errhandler handler;
    MPI_Win_create_errhandler(handle, &handler);
    MPI_Win_set_errhandler(window, handler);
    for (unsigned at = 0; at < sizeof WRONG / sizeof *WRONG; at++) {
        handled = 0;
        int class = class_of(WRONG[at].call());
        printf("%s is handled %d times and returns %s\n", WRONG[at].name, handled, name_of(class));
    }
    MPI_Errhandler_free(&handler);
    MPI_Win_set_errhandler(window, MPI_ERRORS_RETURN);
    lock();
    printf("an update by no operation returns %s\n", name_of(class_of(
        MPI_Accumulate(&item, 1, MPI_LONG, 0, 3, 1, MPI_LONG, MPI_NO_OP, window))));
    unlock();
    MPI_Win_free(&window);
}

/* A window begins where the program asks, and its parts are those of their ranks. */
static void aligned(const char *bytes) {
    MPI_Info info;
    MPI_Info_create(&info);
    MPI_Info_set(info, "mpi_minimum_memory_alignment", bytes);
    /* Of both, of one, and of a window whose parts lie together. */
    for (int kind = 0; kind < 3; kind++) {
        long *base, read = -1;
        int asks = kind != 1 || rank == 1;
        int (*make)(MPI_Aint, int, MPI_Info, MPI_Comm, void *, MPI_Win *) = kind < 2 ? MPI_Win_allocate : MPI_Win_allocate_shared;
        make(1000 + 8 * rank, 8, asks ? info : MPI_INFO_NULL, WORLD, &base, &window);
        if (asks && (kind < 2 || rank == 0)) expect((uintptr_t)base % strtoul(bytes, NULL, 10) == 0, "an alignment");
        base[0] = 100 + rank;
        base[124 + rank] = 200 + rank;
        MPI_Win_fence(0, window);
        MPI_Put(&base[0], 1, MPI_LONG, 1 - rank, 1, 1, MPI_LONG, window);
        MPI_Get(&read, 1, MPI_LONG, 1 - rank, 125 - rank, 1, MPI_LONG, window);
        MPI_Win_fence(0, window);
        expect(base[1] == 101 - rank && read == 201 - rank, "what lies in a window that is aligned");
        MPI_Win_free(&window);
    }
    MPI_Info_free(&info);
}

static unsigned drawn(unsigned *seed, unsigned below) {
    *seed = *seed * 1103515245 + 12345;
    return (*seed >> 16) % below;
}

/* What rank 0 does to two targets, while rank 1 posts and waits. MPICH aborts at the first of three misuses, and does not notice the
 * others: they are for the shim alone. */
static void targets(const char *how, int is_library) {
    const int SYNC = MPI_ERR_RMA_SYNC;
    MPI_Group world, first, second;
    MPI_Comm_group(WORLD, &world);
    MPI_Group_incl(world, 1, (int[]){0}, &first);
    MPI_Group_incl(world, 1, (int[]){1}, &second);
    make(how, WORLD);
    MPI_Barrier(WORLD);
#define GIVES(class, what, call) expect(class_of(call) == (class), what)
    if (rank == 0) {
        GIVES(0, "lock of 1", MPI_Win_lock(MPI_LOCK_SHARED, 1, 0, window));
        GIVES(0, "unlock of 1", MPI_Win_unlock(1, window));
        GIVES(0, "lock of 0", lock());
        if (!is_library) {
            GIVES(SYNC, "unlock of a target that is not locked", MPI_Win_unlock(1, window));
            GIVES(SYNC, "flush of a target that is not locked", MPI_Win_flush(1, window));
            GIVES(SYNC, "put to a target that is not locked", MPI_Put(&item, 1, MPI_LONG, 1, 0, 1, MPI_LONG, window));
        }
        GIVES(0, "lock of both", MPI_Win_lock(MPI_LOCK_SHARED, 1, 0, window));
        GIVES(SYNC, "a second lock", MPI_Win_lock(MPI_LOCK_SHARED, 1, 0, window));
        GIVES(SYNC, "lock of all in an epoch", lock_all());
        GIVES(SYNC, "unlock of all", unlock_all());
        GIVES(0, "unlock of 0", unlock());
        GIVES(0, "flush of 1", MPI_Win_flush(1, window));
        GIVES(0, "unlock of 1", MPI_Win_unlock(1, window));
        GIVES(SYNC, "put after the last unlock", put());
        GIVES(0, "lock of nobody", MPI_Win_lock(MPI_LOCK_SHARED, MPI_PROC_NULL, 0, window));
        GIVES(SYNC, "put after a lock of nobody", put());
        GIVES(MPI_ERR_RANK, "lock of no rank", MPI_Win_lock(MPI_LOCK_SHARED, 9, 0, window));
        GIVES(0, "start", MPI_Win_start(second, 0, window));
        GIVES(SYNC, "put outside the group", put());
        GIVES(0, "put to the group", MPI_Put(&item, 1, MPI_LONG, 1, 0, 1, MPI_LONG, window));
        GIVES(SYNC, "start in an epoch", MPI_Win_start(second, 0, window));
        GIVES(SYNC, "lock in an epoch of start", lock());
        GIVES(SYNC, "fence in an epoch of start", fence());
        GIVES(0, "complete", complete());
        GIVES(SYNC, "complete again", complete());
    } else {
        GIVES(0, "post", MPI_Win_post(first, 0, window));
        GIVES(SYNC, "a second post", MPI_Win_post(first, 0, window));
        GIVES(SYNC, "a fence of what is posted", fence());
        GIVES(SYNC, "free of what is posted", MPI_Win_free(&window));
        GIVES(0, "wait", MPI_Win_wait(window));
        GIVES(SYNC, "wait again", MPI_Win_wait(window));
    }
    MPI_Barrier(WORLD);
    GIVES(0, "free after all epochs have ended", MPI_Win_free(&window));
}

int main(int count, char **arguments) {
    begin(&count, &arguments);
    const char *how = arguments[1];
    MPI_Comm_group(MPI_COMM_SELF, &self);
    if (ranks > 1) {
        targets(how, count > 2);
        /* MPICH aligns no window. */
        if (count == 2 && !strcmp(how, "allocate")) {
            aligned("128");
            aligned("65536");
        }
        return end();
    }
    with_handler(how);
    for (int first = 0; first < ALL; first++)
        for (int second = 0; second < ALL; second++) sequence(how, (int[]){first, second}, 2);
    for (int at = 0; at < KINDS * KINDS * KINDS; at++)
        sequence(how, (int[]){at / KINDS / KINDS, at / KINDS % KINDS, at % KINDS}, 3);
    for (unsigned seed = 0; seed < 300; seed++) {
        unsigned state = seed;
        int calls[10];
        for (int at = 0; at < 10; at++) calls[at] = drawn(&state, ALL);
        sequence(how, calls, 10);
    }
    return end();
}
