/* One host sends messages, another receives them, in either order of starting.
 *
 *     cc ring.c -o ring $(pkg-config --cflags --libs polder)
 *     POLDER_HOST=1 ./ring receive & POLDER_HOST=0 ./ring send */
#include <inttypes.h>
#include <polder.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { MESSAGES = 100, LONGEST = 66666, PATIENCE = 10000 };
static unsigned char message[LONGEST];

static void check(int status) {
    if (status != POLDER_OK) {
        fprintf(stderr, "ring: %s\n", polder_error());
        exit(status);
    }
}

/* Messages grow, up to more than a cell holds. */
static size_t length(uint64_t number) { return number * LONGEST / (MESSAGES - 1); }

static void send(polder_pool *pool) {
    polder_sender *sender;
    check(polder_ring_create(pool, "/example/ring", 0, 0, &sender));
    for (uint64_t number = 0; number < MESSAGES; number++) {
        memset(message, (int)number, length(number));
        check(polder_ring_push(sender, number, message, length(number), PATIENCE));
    }
    check(polder_sender_close(sender));
}

/* Makes the ring, and stands still. */
static void wait_for_ever(polder_pool *pool) {
    polder_sender *sender;
    check(polder_ring_create(pool, "/example/ring", 0, 0, &sender));
    puts("the ring is there");
    fflush(stdout);
    pause();
    check(polder_sender_close(sender));
}

static void receive(polder_pool *pool) {
    polder_receiver *receiver;
    uint64_t tag, number = 0;
    size_t bytes, total = 0;
    int status;
    check(polder_ring_open(pool, "/example/ring", PATIENCE, &receiver));
    for (; !(status = polder_ring_pop(receiver, &tag, message, sizeof message, &bytes, PATIENCE)); number++) {
        if (tag != number || bytes != length(number) || (bytes && message[bytes - 1] != number)) {
            fprintf(stderr, "ring: message %" PRIu64 " is not what was sent\n", number);
            exit(1);
        }
        total += bytes;
    }
    /* A sender that closes the ring ends it; one that dies does so too. */
    if (status != POLDER_ENDED && status != POLDER_PEER_DEAD) check(status);
    const char *why = polder_error();
    printf("%" PRIu64 " messages, %zu bytes; then: %.*s\n", number, total, (int)strcspn(why, ":"), why);
    check(polder_receiver_close(receiver));
}

int main(int count, char **arguments) {
    polder_pool *pool;
    check(polder_pool_open(NULL, -1, &pool));
    if (count == 2 && !strcmp(arguments[1], "send"))
        send(pool);
    else if (count == 2 && !strcmp(arguments[1], "receive"))
        receive(pool);
    else if (count == 2 && !strcmp(arguments[1], "wait"))
        wait_for_ever(pool);
    else
        fprintf(stderr, "usage: ring send|receive|wait\n");
    check(polder_pool_close(pool));
    return 0;
}
