// Stands in for NVIDIA's driver (libcuda.so.1, libnvidia-ml.so.1): it has no device, and writes down
// who tries to use it. To load it is no use: cuBLAS does that by itself.
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define NO_DEVICE 100
#define NO_LIBRARY 9

static void note(const char *what) {
  const char *path = getenv("DRIVER_LOG");
  if (!path) return;
  char text[64];
  const int length = snprintf(text, sizeof text, "%s %d\n", what, getpid());
  const int fd = open(path, O_WRONLY | O_CREAT | O_APPEND, 0600);
  if (fd < 0 || write(fd, text, length) != length) abort();
  close(fd);
}

int cuInit(unsigned flags) {
  (void)flags;
  note("cuInit");
  return NO_DEVICE;
}

static int anything(void) { return NO_DEVICE; }

int cuDriverGetVersion(int *version) {
  *version = 13000;
  return 0;
}

int cuGetProcAddress_v2(const char *name, void **found, int version, unsigned long flags,
                        int *status) {
  (void)version;
  (void)flags;
  *found = (void *)anything;
  if (!strcmp(name, "cuInit")) *found = (void *)cuInit;
  if (!strcmp(name, "cuDriverGetVersion")) *found = (void *)cuDriverGetVersion;
  if (!strncmp(name, "cuGetProcAddress", 16)) *found = (void *)cuGetProcAddress_v2;
  if (status) *status = 0;
  return 0;
}

int nvmlInit_v2(void) {
  note("nvmlInit");
  return NO_LIBRARY;
}

int nvmlInitWithFlags(unsigned flags) {
  (void)flags;
  return nvmlInit_v2();
}
