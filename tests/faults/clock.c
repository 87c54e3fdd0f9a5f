/* A clock that is set back, for the processes that preload this: seconds are taken off what the system's clock says.

   FAULTS_CLOCK: a file of eight bytes, a long: by how many. The clock that only goes forward (CLOCK_MONOTONIC) stays. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>

static long back(void) {
  static const volatile long *seconds;
  if (!seconds) {
    const char *path = getenv("FAULTS_CLOCK");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    void *mapped = file < 0 ? MAP_FAILED : mmap(NULL, sizeof(long), PROT_READ, MAP_SHARED, file, 0);
    if (mapped == MAP_FAILED) return 0;
    seconds = mapped; /* the file stays open: so small a leak ends with the process */
  }
  return *seconds;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
  static int (*plain)(clockid_t, struct timespec *);
  if (!plain) plain = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
  int failed = plain(clock, now);
  if (!failed && clock == CLOCK_REALTIME) now->tv_sec -= back();
  return failed;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
  struct timespec exact;
  (void)zone;
  if (clock_gettime(CLOCK_REALTIME, &exact)) return -1;
  now->tv_sec = exact.tv_sec;
  now->tv_usec = exact.tv_nsec / 1000;
  return 0;
}

time_t time(time_t *now) {
  struct timespec exact;
  clock_gettime(CLOCK_REALTIME, &exact);
  if (now) *now = exact.tv_sec;
  return exact.tv_sec;
}
