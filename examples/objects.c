/* One host publishes a table, another sums it: the pool is named by POLDER_POOL, each host by POLDER_HOST.
 *
 *     cc objects.c -o objects $(pkg-config --cflags --libs polder)
 *     POLDER_HOST=0 ./objects publish && POLDER_HOST=1 ./objects sum */
#include <inttypes.h>
#include <polder.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { COUNT = 1000 };
static uint64_t table[COUNT];

static void check(int status) {
    if (status != POLDER_OK) {
        fprintf(stderr, "objects: %s\n", polder_error());
        exit(status);
    }
}

static void publish(polder_pool *pool) {
    polder_object *object;
    check(polder_object_create(pool, "/example/table", sizeof table, &object));
    for (uint64_t i = 0; i < COUNT; i++) table[i] = i;
    check(polder_object_write(object, 0, table, sizeof table));
    /* The last element again, without a copy: stored where the object is mapped, and published then. */
    uint64_t *mapped = polder_object_address(object);
    if (mapped) {
        mapped[COUNT - 1] = 0;
        check(polder_object_publish(object, (COUNT - 1) * sizeof *mapped, sizeof *mapped));
    }
    check(polder_object_close(object));
}

static void sum(polder_pool *pool) {
    polder_object *object;
    check(polder_object_open(pool, "/example/table", &object));
    check(polder_object_read(object, 0, table, polder_object_size(object)));
    uint64_t sum = 0;
    for (int i = 0; i < COUNT; i++) sum += table[i];
    printf("%" PRIu64 "\n", sum);
    check(polder_object_close(object));
    check(polder_object_destroy(pool, "/example/table"));
}

int main(int count, char **arguments) {
    polder_pool *pool;
    check(polder_pool_open(NULL, -1, &pool));
    if (count == 2 && !strcmp(arguments[1], "publish"))
        publish(pool);
    else if (count == 2 && !strcmp(arguments[1], "sum"))
        sum(pool);
    else
        fprintf(stderr, "usage: objects publish|sum\n");
    check(polder_pool_close(pool));
    return 0;
}
