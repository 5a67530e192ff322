/* SPDX-License-Identifier: Apache-2.0
 * A program that is built with the headers alone and takes the library that its argument names. */
#include <attnres/attnres.h>
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

int main(int argc, char** argv) {
  attnres_status (*probe_device)(int32_t, attnres_probe_info*);
  int32_t (*version)(void);
  attnres_probe_info probe = {.struct_size = sizeof(probe)};
  void* library = argc == 2 ? dlopen(argv[1], RTLD_NOW) : NULL;
  void* symbol;
  if (library == NULL) {
    fprintf(stderr, "%s\n", argc == 2 ? dlerror() : "usage: load_at_run_time LIBRARY");
    return 1;
  }
  /* ISO C has no conversion from an object pointer to a function pointer. */
  symbol = dlsym(library, "attnres_version");
  memcpy(&version, &symbol, sizeof(version));
  if (symbol == NULL || version() / 100 != 100 * ATTNRES_VERSION_MAJOR + ATTNRES_VERSION_MINOR) {
    fprintf(stderr, "another minor version than the header's\n");
    return 1;
  }
  symbol = dlsym(library, "attnres_probe");
  memcpy(&probe_device, &symbol, sizeof(probe_device));
  if (symbol == NULL || probe_device(-1, &probe) != ATTNRES_OK) {
    fprintf(stderr, "attnres_probe failed\n");
    return 1;
  }
  printf("native kernels: %s\n", probe.native ? probe.target : probe.reason);
  return !probe.native && probe.reason[0] == '\0';
}
