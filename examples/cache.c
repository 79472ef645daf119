/* One host puts two blocks into a cache, another gets them.
 *
 *     cc cache.c -o cache $(pkg-config --cflags --libs polder)
 *     POLDER_HOST=0 ./cache put && POLDER_HOST=1 ./cache get */
#include <polder.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { BLOCKS = 3, BYTES = 65536 };
static unsigned char blocks[BLOCKS][BYTES], found[BLOCKS];
/* An engine takes the first 16 bytes of its hash of the tokens. */
static const unsigned char keys[BLOCKS][16] = {"first", "second", "third"};
/* The SHA-256 of the identity. */
static const char *identity = "{\"model\":\"tiny\"}";
static const unsigned char hash[32] = {
    0x63, 0x57, 0xff, 0x6e, 0x9f, 0x34, 0xc0, 0xa7, 0xe5, 0x7c, 0x20, 0xc6, 0xe1, 0x5f, 0xd2, 0x0a,
    0xd1, 0x71, 0x32, 0x9c, 0xac, 0xb1, 0xf3, 0xe4, 0xa6, 0x27, 0xdf, 0xd9, 0xdc, 0x6d, 0xf5, 0x13};

static void check(int status) {
    if (status != POLDER_OK) {
        fprintf(stderr, "cache: %s\n", polder_error());
        exit(status);
    }
}

static void put(polder_kv *kv) {
    const void *from[] = {blocks[0], blocks[1]};
    uint64_t refused;
    for (int block = 0; block < 2; block++) memset(blocks[block], block + 1, BYTES);
    check(polder_kv_put(kv, keys, from, 2, &refused));
    if (refused) fprintf(stderr, "cache: no room for %d blocks\n", (int)refused);
}

static void get(polder_kv *kv, int second) {
    void *into[] = {blocks[0], blocks[second], blocks[2]};
    int there = 0, got = 0;
    check(polder_kv_lookup(kv, keys, BLOCKS, found));
    for (int block = 0; block < BLOCKS; block++) there += found[block];
    check(polder_kv_get(kv, keys, into, BLOCKS, found));
    for (int block = 0; block < BLOCKS; block++) got += found[block] && blocks[block][BYTES - 1] == block + 1;
    if (got != there) fprintf(stderr, "cache: %d of %d blocks are right\n", got, there);
    printf("%d of %d blocks\n", got, BLOCKS);
}

int main(int count, char **arguments) {
    polder_pool *pool;
    polder_kv *kv;
    check(polder_pool_open(NULL, -1, &pool));
    check(polder_kv_open(pool, "example", identity, hash, BYTES, 0, &kv));
    if (count == 2 && !strcmp(arguments[1], "put"))
        put(kv);
    else if (count == 2 && !strcmp(arguments[1], "get"))
        get(kv, 1);
    else if (count == 2 && !strcmp(arguments[1], "twice"))
        get(kv, 0);
    else
        fprintf(stderr, "usage: cache put|get\n");
    check(polder_kv_close(kv));
    check(polder_pool_close(pool));
    return 0;
}
