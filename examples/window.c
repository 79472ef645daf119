/* Every rank counts in the memory of rank 0, once by an update and once under a lock, and leaves a word with its neighbour.
 *
 *     cc window.c -o window $(pkg-config --cflags --libs polder)
 *     POLDER_HOST=0 ./window 0 2 & POLDER_HOST=1 ./window 1 2 */
#include <inttypes.h>
#include <polder.h>
#include <stdio.h>
#include <stdlib.h>

enum { TIMES = 200, PATIENCE = 10000 };
/* Where the words lie in each rank's segment. */
enum { ADDED = 0, LOCKED = 8, FROM_LEFT = 16, READY = 24, BYTES = 32 };

static void check(int status) {
    if (status != POLDER_OK) {
        fprintf(stderr, "window: %s\n", polder_error());
        exit(status);
    }
}

static uint64_t get(polder_window *window, uint32_t rank, size_t offset) {
    uint64_t word;
    check(polder_window_get(window, rank, offset, &word, sizeof word));
    return word;
}

int main(int count, char **arguments) {
    if (count != 3) {
        fprintf(stderr, "usage: window RANK RANKS\n");
        return 1;
    }
    uint32_t rank = (uint32_t)atoi(arguments[1]), ranks = (uint32_t)atoi(arguments[2]), right = (rank + 1) % ranks;
    polder_pool *pool;
    polder_window *window;
    check(polder_pool_open(NULL, -1, &pool));
    check(polder_window_create(pool, "/example", rank, ranks, BYTES, PATIENCE, &window));
    for (int time = 0; time < TIMES; time++) {
        check(polder_window_add(window, 0, ADDED, 1, NULL));
        check(polder_window_lock(window, 0, 0, PATIENCE));
        uint64_t next = get(window, 0, LOCKED) + 1;
        check(polder_window_put(window, 0, LOCKED, &next, sizeof next));
        check(polder_window_unlock(window, 0));
    }
    uint64_t word = 100 + rank;
    check(polder_window_put(window, right, FROM_LEFT, &word, sizeof word));
    /* What was put is there before this rank is counted as ready. */
    check(polder_window_flush(window));
    check(polder_window_add(window, 0, READY, 1, NULL));
    while (get(window, 0, READY) < ranks) continue;
    printf("%" PRIu64 " %" PRIu64 " %" PRIu64 "\n", get(window, 0, ADDED), get(window, 0, LOCKED),
           get(window, rank, FROM_LEFT));
    check(polder_window_close(window));
    check(polder_pool_close(pool));
    return 0;
}
