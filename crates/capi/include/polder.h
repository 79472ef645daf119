/* polder.h: one pool of shared memory for many hosts, in C.
 *
 * Every call that can fail returns a polder_status: POLDER_OK, which is 0, or an error. After an error, the handle that the call
 * was to make is NULL. polder_error() gives a sentence that names the offender and the remedy.
 *
 * A call that ends in _open or _create makes a handle. The _close of its kind gives it up, once. NULL may be closed too.
 * A pool stays attached until every handle that was made with it is closed. Threads may share a pool and its objects. A forked
 * child may close its parent's handles; any other call with one fails with POLDER_ARGUMENT. A call that has no status then returns NULL
 * or 0, as it does for a handle that is NULL.
 *
 * Names of objects, rings and windows look like "/train/weights". They begin with "/" and have at most 255 bytes. They have no
 * control characters, and no parts that are empty, "." or "..". The name of a window may leave out its first "/": "w" and "/w" are
 * one window.
 *
 * docs/c.md has a complete program. */
#ifndef POLDER_H
#define POLDER_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum polder_status {
    POLDER_OK = 0,
    /* An argument or a setting that cannot be used. */
    POLDER_ARGUMENT = 1,
    /* No pool or no object of this name. */
    POLDER_NOT_FOUND = 2,
    /* The name is taken. */
    POLDER_EXISTS = 3,
    /* No room in the pool, its directory, the job's quota, or this process's table of open objects. */
    POLDER_FULL = 4,
    /* No process has died, but the answer did not come in time. A process that is stopped, as by a debugger, is late too. */
    POLDER_TIMEOUT = 5,
    /* The process that the call waited for died, left or closed its end, or it runs under another kernel and gave no sign of life
     * for 5 s. */
    POLDER_PEER_DEAD = 6,
    /* Bytes in the pool that no correct program left there. */
    POLDER_CORRUPT = 7,
    /* This host may not join the pool, or was evicted from it. */
    POLDER_MEMBERSHIP = 8,
    /* The memory itself failed: poison, or a lost link. */
    POLDER_MEMORY = 9,
    /* Anything else; polder_error() says what. */
    POLDER_OTHER = 10,
    /* No error but the end of a ring: its sender has closed it, and every message was received. */
    POLDER_ENDED = 11
} polder_status;

/* Handles: a pool that this process has attached; an object that it holds open; the two ends of a ring; one rank's side of a
 * window; a cache. */
typedef struct polder_pool polder_pool;
typedef struct polder_object polder_object;
typedef struct polder_sender polder_sender;
typedef struct polder_receiver polder_receiver;
typedef struct polder_window polder_window;
typedef struct polder_kv polder_kv;

/* What went wrong last in this thread; "" if nothing did. Stays as it is until the next call of this thread fails. */
const char *polder_error(void);

/* The version of this library. */
const char *polder_version(void);

/* Attaches the pool at `path`, as host `host` of it. NULL and a negative host mean POLDER_POOL and POLDER_HOST; all other settings come
 * from the environment and the config file, as everywhere. */
int polder_pool_open(const char *path, int host, polder_pool **pool);

/* Lets go of the pool, and of the host when this was its last process. */
int polder_pool_close(polder_pool *pool);

/* Makes the object `name` of `bytes` zeros, and holds it open. */
int polder_object_create(polder_pool *pool, const char *name, size_t bytes, polder_object **object);

/* Opens the object `name`, which any host may have made. */
int polder_object_open(polder_pool *pool, const char *name, polder_object **object);

/* Destroys the object `name`: it can no longer be opened. Its bytes stay until every process that holds it open has closed it. */
int polder_object_destroy(polder_pool *pool, const char *name);

/* Lets go of an object; its address is no longer valid then. */
int polder_object_close(polder_object *object);

/* The size of an object in bytes, as it was created. */
size_t polder_object_size(const polder_object *object);

/* Copies bytes out, afresh: all that was published before the call is seen. */
int polder_object_read(const polder_object *object, size_t offset, void *into, size_t bytes);

/* Copies bytes in and publishes them: once this returns, a read anywhere sees them. Only one host at a time may write to a line of
 * 64 bytes: lines at the two ends are written whole. */
int polder_object_write(const polder_object *object, size_t offset, const void *from, size_t bytes);

/* The address of the object, a multiple of 64, for programs that load and store in place. Other hosts see a store once it is
 * published. This host sees what others published once it has refreshed it. On coherent memory both calls are only fences. */
void *polder_object_address(const polder_object *object);

/* Publishes what this host stored in a range. Whole lines go out. */
int polder_object_publish(const polder_object *object, size_t offset, size_t bytes);

/* Drops what this host's caches hold of a range, so that the next loads see what was published. It also publishes stores of this
 * host to the range, so refresh only what another host owns. */
int polder_object_refresh(const polder_object *object, size_t offset, size_t bytes);

/* A ring carries messages from one process to another, in order. The sender makes it, and the receiver opens it. After the receiver
 * has closed it, no other process can open it. Threads may share an end, and take turns. Times are in milliseconds. */

/* Makes the ring `name`, which holds `cells` messages of up to `cell_bytes` bytes, a multiple of 64, each; longer ones go through several
 * cells. 0 and 0 mean 8 cells of 64 KiB, which suits most. */
int polder_ring_create(polder_pool *pool, const char *name, uint32_t cells, uint32_t cell_bytes, polder_sender **sender);

/* Opens the ring `name` to receive. Waits until it exists, and returns POLDER_NOT_FOUND if it does not in time. The result is
 * POLDER_EXISTS if it has been opened to receive before. */
int polder_ring_open(polder_pool *pool, const char *name, uint64_t timeout_ms, polder_receiver **receiver);

/* Sends a message. Waits for a receiver and for room. Once this returns, the receiver gets the message, even if this process dies. */
int polder_ring_push(polder_sender *sender, uint64_t tag, const void *from, size_t bytes, uint64_t timeout_ms);

/* Waits for the next message, and copies it and its tag out; `tag` may be NULL. `bytes` is its length. If `room` is too small, the
 * result is POLDER_ARGUMENT, `bytes` is still set, and the message stays: pop it again with so much room. After the last message, the
 * result is POLDER_ENDED if the sender has closed the ring, and POLDER_PEER_DEAD if it died, or closed in the middle of a message. */
int polder_ring_pop(polder_receiver *receiver, uint64_t *tag, void *into, size_t room, size_t *bytes, uint64_t timeout_ms);

/* Ends the ring; what was sent can still be received. */
int polder_sender_close(polder_sender *sender);

/* Receives no more; the sender's next push returns POLDER_PEER_DEAD. */
int polder_receiver_close(polder_receiver *receiver);

/* In a window, every rank of a group of processes has a segment of memory, and all ranks put into and get from all segments. Ranks count
 * from 0. Threads may share a window, and take turns. */

/* Makes this rank's segment of `bytes` zeros in the window `name`, and waits until all `ranks` have made theirs. The
 * result is POLDER_EXISTS if the rank is taken. */
int polder_window_create(polder_pool *pool, const char *name, uint32_t rank, uint32_t ranks, size_t bytes, uint64_t timeout_ms,
                         polder_window **window);

/* Closes the window. This rank's segment stays until the other ranks have closed it too. */
int polder_window_close(polder_window *window);

/* Stores bytes in a rank's segment. They are visible once they are flushed. Ranks may put to different bytes of a line at once. */
int polder_window_put(polder_window *window, uint32_t rank, size_t offset, const void *from, size_t bytes);

/* Copies bytes out of a rank's segment, afresh: all that was flushed before the call is seen. */
int polder_window_get(polder_window *window, uint32_t rank, size_t offset, void *into, size_t bytes);

/* Makes all that this rank has put visible. */
int polder_window_flush(polder_window *window);

/* Adds to an unsigned number of 8 bytes in a rank's segment, all at once; `before`, if it is not NULL, is what it was. */
int polder_window_add(polder_window *window, uint32_t rank, size_t offset, uint64_t number, uint64_t *before);

/* Replaces such a number if it is `expected`; `before`, if it is not NULL, is what it was. */
int polder_window_swap(polder_window *window, uint32_t rank, size_t offset, uint64_t expected, uint64_t number, uint64_t *before);

/* Waits for the lock of a rank, exclusive or shared. Puts and updates without the lock are not held back. One thread of a window has
 * it at a time, also if it is shared: one that asks again while it has it waits for nothing. */
int polder_window_lock(polder_window *window, uint32_t rank, int shared, uint64_t timeout_ms);

/* Releases the lock of a rank, and flushes what was put. POLDER_ARGUMENT where no thread of the window has the lock. */
int polder_window_unlock(polder_window *window, uint32_t rank);

/* The address of a rank's segment, a multiple of 64. Publish and refresh it like an object. While a host
 * stores to a line here, no rank may put to that line. */
void *polder_window_address(polder_window *window, uint32_t rank);

/* Publishes what this host stored in a range of a rank's segment. */
int polder_window_publish(polder_window *window, uint32_t rank, size_t offset, size_t bytes);

/* Drops what this host's caches hold of such a range. */
int polder_window_refresh(polder_window *window, uint32_t rank, size_t offset, size_t bytes);

/* A cache holds blocks of one size, which are named by what they are computed from. Hosts that store one key both succeed, and the
 * oldest blocks make room. Threads may share a cache. */

/* Opens the cache `name`, without "/" in it, which the first process makes. `identity` says what computes the blocks, such as a model
 * and its weights as JSON, and `hash` is its SHA-256, of 32 bytes: blocks of two hashes never meet. The slabs of the cache take
 * `budget` bytes at most; 0 means what the cache has, and for a new one four fifths of what is free. */
int polder_kv_open(polder_pool *pool, const char *name, const char *identity, const void *hash, uint32_t block_bytes, uint64_t budget,
                   polder_kv **kv);

/* Says of each of `count` keys, of 16 bytes each, whether it has a block: 1 or 0 in `count` bytes at `found`. */
int polder_kv_lookup(polder_kv *kv, const void *keys, size_t count, void *found);

/* Stores the blocks at `count` addresses that are not there yet. Once this returns, every process finds them. `refused` is how many had
 * no room, and may be NULL. */
int polder_kv_put(polder_kv *kv, const void *keys, const void *const *blocks, size_t count, uint64_t *refused);

/* Copies blocks to `count` addresses, and says in `count` bytes at `found` which were there. The bytes at the others mean nothing. */
int polder_kv_get(polder_kv *kv, const void *keys, void *const *into, size_t count, void *found);

/* Lets go of a cache. Its blocks stay. */
int polder_kv_close(polder_kv *kv);

#ifdef __cplusplus
}
#endif

#endif
