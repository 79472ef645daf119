/* The pages of a host as plainly as C says it: a struct for each page, every list of pages walked. It makes the decisions
 * of polder_sim::pages, and is its peer in `polder bench pages`.
 *
 * Reads a file of 32-bit numbers: the kernel's settings, the services, and the accesses. Prints the seconds of all
 * generations but the first, then what became of each service, then a hash of where the pages lie.
 */
#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

enum { OLDEST = 31, PAGE_BYTES = 4096 };

struct page {
  uint32_t since; /* generation of the last access, or of the mark */
  uint16_t service;
  uint8_t present, slow, marked;
};

struct service {
  uint32_t first, pages, scan_hand, reclaim_hand;
  uint32_t fast, slow;
  uint64_t fast_accesses, slow_accesses, faults, promotions, refused, demotions, spills, failures;
};

static uint32_t fast_pages, slow_pages, min_free, low_free, high_free, scan, hot_age, promotions;
static uint32_t services, fast_free, slow_free, promotions_left, generation;
static struct page *page;
static struct service *service;
static uint64_t *owed; /* of each service, bytes less than a page */

static uint32_t age(const struct page *it) {
  uint32_t age = generation - it->since;
  return age < OLDEST ? age : OLDEST;
}

static void promote(struct page *it, struct service *of) {
  it->slow = 0;
  it->since = generation;
  of->fast++, of->slow--, of->promotions++;
  fast_free--, slow_free++;
}

static void access_page(uint32_t number) {
  struct page *it = &page[number];
  struct service *of = &service[it->service];
  if (!it->present) {
    if (fast_free > min_free || (slow_free == 0 && fast_free > 0)) {
      of->fast++, fast_free--, it->slow = 0;
    } else if (slow_free > 0) {
      of->slow++, slow_free--, of->spills++, it->slow = 1;
    } else {
      of->failures++;
      return;
    }
    it->present = 1;
  } else if (it->marked) {
    it->marked = 0;
    of->faults++;
    if (age(it) <= hot_age && promotions_left > 0) {
      if (fast_free > min_free) {
        of->slow_accesses++;
        promotions_left--;
        promote(it, of);
        return;
      }
      of->refused++;
    }
  }
  it->since = generation;
  if (it->slow)
    of->slow_accesses++;
  else
    of->fast_accesses++;
}

static void count_ages(const struct service *of, uint32_t ages[OLDEST + 1]) {
  for (int at = 0; at <= OLDEST; at++) ages[at] = 0;
  for (uint32_t at = of->first; at < of->first + of->pages; at++)
    if (page[at].present && !page[at].slow) ages[age(&page[at])]++;
}

static void demote(struct service *of, uint32_t wanted) {
  uint32_t ages[OLDEST + 1];
  count_ages(of, ages);
  if (wanted > slow_free) wanted = slow_free;
  uint32_t whole = OLDEST + 1, left = wanted, taken = 0;
  while (whole > 0 && ages[whole - 1] <= left) left -= ages[--whole];
  if (whole == 0) left = 0;
  uint32_t hand = of->reclaim_hand;
  for (uint32_t step = 0; step < of->pages; step++) {
    uint32_t at = (hand + step) % of->pages;
    struct page *it = &page[of->first + at];
    if (!it->present || it->slow) continue;
    if (age(it) >= whole) {
      it->slow = 1, taken++;
    } else if (left > 0 && age(it) + 1 == whole) {
      it->slow = 1, taken++, left--;
      of->reclaim_hand = (at + 1) % of->pages;
    }
  }
  of->fast -= taken, of->slow += taken, of->demotions += taken;
  fast_free += taken, slow_free -= taken;
}

static void mark(struct service *of) {
  uint32_t left = scan;
  uint64_t looks = 8 * (uint64_t)scan;
  for (uint32_t step = 0; step < of->pages && step < looks && left > 0; step++) {
    struct page *it = &page[of->first + of->scan_hand];
    if (it->present && it->slow && !it->marked) {
      it->marked = 1, it->since = generation;
      left--;
    }
    of->scan_hand = (of->scan_hand + 1) % of->pages;
  }
}

static void reclaim(void) {
  if (fast_free >= low_free) return;
  uint64_t wanted = high_free - fast_free;
  if (wanted > slow_free) wanted = slow_free;
  /* Pages of each service; those that were not accessed in the generation that has ended; and what it gives. */
  uint64_t own[services], cold[services], given[services];
  for (uint32_t at = 0; at < services; at++) {
    uint32_t ages[OLDEST + 1];
    count_ages(&service[at], ages);
    own[at] = cold[at] = given[at] = 0;
    for (uint32_t old = 0; old <= OLDEST; old++) own[at] += ages[old], cold[at] += old >= 2 ? ages[old] : 0;
  }
  for (int also_hot = 0; also_hot < 2; also_hot++) {
    const uint64_t *most = also_hot ? own : cold;
    for (;;) {
      uint64_t all = 0;
      uint8_t open[services];
      for (uint32_t at = 0; at < services; at++) {
        open[at] = given[at] < most[at];
        all += open[at] ? own[at] : 0;
      }
      if (wanted == 0 || all == 0) break;
      for (uint32_t at = 0; at < services; at++) {
        if (!open[at]) continue;
        uint64_t share = (wanted * own[at] + all - 1) / all, rest = most[at] - given[at];
        if (share > rest) share = rest;
        given[at] += share, wanted -= share, all -= own[at];
      }
    }
  }
  for (uint32_t at = 0; at < services; at++)
    if (given[at] > 0) demote(&service[at], given[at]);
}

/* Fair share: what lies on the fast tier beyond `high` of a service goes down. The step is divided in proportion to that; bytes less than
   a page are owed to the service in the next round. */
static void control(double high, uint32_t step) {
  uint64_t left = (uint64_t)(step < slow_free ? step : slow_free) * PAGE_BYTES, unspent = left;
  uint64_t wants[services], most[services], part[services];
  unsigned __int128 wanted = 0;
  for (uint32_t at = 0; at < services; at++) {
    uint64_t fast = (uint64_t)service[at].fast * PAGE_BYTES, slow = (uint64_t)service[at].slow * PAGE_BYTES;
    double over = (double)fast - high * (double)(fast + slow);
    wants[at] = over > 0 && slow_free > 0 ? (uint64_t)round(over) : 0;
    if (wants[at] > fast) wants[at] = fast;
    most[at] = wants[at] < (uint64_t)step * PAGE_BYTES ? wants[at] : (uint64_t)step * PAGE_BYTES;
    part[at] = 0;
    wanted += wants[at];
    if (wants[at] == 0) owed[at] = 0;
  }
  bool done[services];
  for (uint32_t at = 0; at < services; at++) done[at] = wants[at] == 0;
  for (;;) {
    /* Those that can take the smallest part of what they want come first. */
    uint32_t next = services;
    for (uint32_t at = 0; at < services; at++) {
      if (done[at]) continue;
      if (next == services || (unsigned __int128)most[at] * wants[next] < (unsigned __int128)most[next] * wants[at]) next = at;
    }
    if (next == services) break;
    done[next] = true;
    uint64_t exact = (uint64_t)((unsigned __int128)left * wants[next] / wanted);
    if (exact < 1) exact = 1;
    if (exact > most[next]) exact = most[next];
    wanted -= wants[next];
    left -= exact < left ? exact : left;
    uint64_t due = exact + owed[next];
    part[next] = due >= most[next] ? most[next] : due / PAGE_BYTES * PAGE_BYTES;
    if (part[next] > unspent) part[next] = unspent;
    unspent -= part[next];
    owed[next] = part[next] < most[next] && due > part[next] ? due - part[next] : 0;
  }
  for (uint32_t at = 0; at < services; at++)
    if (part[at] >= PAGE_BYTES) demote(&service[at], part[at] / PAGE_BYTES);
}

static void end_generation(double high, uint32_t step) {
  generation++;
  promotions_left = promotions;
  for (uint32_t at = 0; at < services; at++) mark(&service[at]);
  reclaim();
  control(high, step);
}

static uint32_t number(FILE *from) {
  uint32_t it;
  if (fread(&it, sizeof it, 1, from) != 1) exit(2);
  return it;
}

int main(int count, char **words) {
  FILE *from = count == 2 ? fopen(words[1], "rb") : NULL;
  if (!from) return 2;
  fast_pages = number(from), slow_pages = number(from);
  min_free = number(from), low_free = number(from), high_free = number(from);
  scan = number(from), hot_age = number(from), promotions = number(from);
  double high = number(from) / 1000.0;
  uint32_t step = number(from);
  services = number(from);
  fast_free = fast_pages, slow_free = slow_pages, promotions_left = promotions;
  service = calloc(services, sizeof *service);
  owed = calloc(services, sizeof *owed);
  uint32_t pages = 0;
  for (uint32_t at = 0; at < services; at++) {
    service[at].first = number(from), service[at].pages = number(from);
    pages = service[at].first + service[at].pages;
  }
  page = calloc(pages, sizeof *page);
  for (uint32_t at = 0; at < services; at++)
    for (uint32_t it = 0; it < service[at].pages; it++) page[service[at].first + it].service = at;
  uint32_t generations = number(from);
  double seconds = 0;
  for (uint32_t at = 0; at < generations; at++) {
    uint32_t accesses = number(from);
    uint32_t *trace = malloc((size_t)accesses * sizeof *trace);
    if (fread(trace, sizeof *trace, accesses, from) != accesses) return 2;
    struct timespec begin, end;
    clock_gettime(CLOCK_MONOTONIC, &begin);
    for (uint32_t it = 0; it < accesses; it++) access_page(trace[it]);
    end_generation(high, step);
    clock_gettime(CLOCK_MONOTONIC, &end);
    /* The first generation fills the tiers. */
    if (at > 0) seconds += (double)(end.tv_sec - begin.tv_sec) + 1e-9 * (double)(end.tv_nsec - begin.tv_nsec);
    free(trace);
  }
  printf("%.9f\n", seconds);
  for (uint32_t at = 0; at < services; at++) {
    struct service it = service[at];
    uint64_t figures[] = {it.fast,       it.slow,    it.fast_accesses, it.slow_accesses, it.faults,
                          it.promotions, it.refused, it.demotions,     it.spills,        it.failures};
    for (unsigned at = 0; at < sizeof figures / sizeof *figures; at++)
      printf("%llu\n", (unsigned long long)figures[at]);
  }
  uint64_t hash = 0xcbf29ce484222325;
  for (uint32_t at = 0; at < services; at++)
    for (uint32_t it = 0; it < service[at].pages; it++) {
      struct page *one = &page[service[at].first + it];
      hash = (hash ^ (uint64_t)(one->present ? 1 + one->slow : 0)) * 0x100000001b3;
    }
  printf("%llu\n", (unsigned long long)hash);
  return 0;
}
