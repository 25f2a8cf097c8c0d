/* Barrier of threads that meet every few microseconds.
 *
 * A thread spins for a moment and then sleeps. OpenMP's barriers only spin or only sleep: the former
 * is slow while other processes use the CPU, the latter costs more than the work between barriers.
 */
#ifndef TINKEX_TEAM_H
#define TINKEX_TEAM_H

#include <limits.h>
#include <omp.h>
#include <sched.h>
#include <stdatomic.h>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

enum { SPINS = 1000 /* about 10 microseconds */ };

/* The threads of a parallel region; zero at its start. */
typedef struct {
    atomic_int arrived;
    atomic_int generation;
    atomic_int sleepers;
    atomic_long next_task; /* for loops that threads share; zero after each barrier */
} team;

static inline void pause_thread(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* Sleep until the generation changes, or for less. */
static inline void sleep_in_team(team *all, int generation)
{
#if defined(__linux__)
    atomic_fetch_add(&all->sleepers, 1);
    syscall(SYS_futex, &all->generation, FUTEX_WAIT_PRIVATE, generation, 0, 0, 0);
    atomic_fetch_sub(&all->sleepers, 1);
#else
    (void)all, (void)generation;
    sched_yield();
#endif
}

static inline void wake_team(team *all)
{
#if defined(__linux__)
    if (atomic_load(&all->sleepers))
        syscall(SYS_futex, &all->generation, FUTEX_WAKE_PRIVATE, INT_MAX, 0, 0, 0);
#else
    (void)all;
#endif
}

/* Wait until all threads of the parallel region are here. */
static inline void wait_for_team(team *all)
{
    int generation = atomic_load(&all->generation);
    if (atomic_fetch_add(&all->arrived, 1) + 1 == omp_get_num_threads()) {
        atomic_store(&all->arrived, 0);
        atomic_store(&all->next_task, 0);
        atomic_store(&all->generation, generation + 1);
        wake_team(all);
        return;
    }
    for (int i = 0; i < SPINS; i++) {
        if (atomic_load_explicit(&all->generation, memory_order_acquire) != generation)
            return;
        pause_thread();
    }
    while (atomic_load(&all->generation) == generation)
        sleep_in_team(all, generation);
}

#endif
