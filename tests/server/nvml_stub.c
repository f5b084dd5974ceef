/* Test double of libnvidia-ml.so.1: GPUs from a text file named by NVML_STUB, one line a GPU:
   "sm_mhz max_sm_mhz mem_mhz power_mw limit_mw temp_c busy_pct used_mib reasons". It is read again at every question,
   so that a test can change what the GPUs do. Power of -1 answers "not supported". Written for these tests. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef int Ret;
typedef struct { int index; } Device;
typedef Device *Handle;
typedef struct { long sm, max_sm, mem, power, limit, temp, busy, used; unsigned long long reasons; } State;

static Device devices[16];
static State states[16];
static int count = 0;

static void load(void) {
    const char *path = getenv("NVML_STUB");
    FILE *file = path ? fopen(path, "r") : NULL;
    count = 0;
    if (!file) return;
    while (count < 16) {
        State *s = &states[count];
        if (fscanf(file, "%ld %ld %ld %ld %ld %ld %ld %ld %llx", &s->sm, &s->max_sm, &s->mem, &s->power, &s->limit,
                   &s->temp, &s->busy, &s->used, &s->reasons) != 9) break;
        devices[count].index = count;
        count++;
    }
    fclose(file);
}

static State *at(Handle h) { load(); return &states[h->index]; }

Ret nvmlInitWithFlags(unsigned flags) { (void)flags; load(); return count ? 0 : 9; }
Ret nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
Ret nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(Ret r) { return r == 3 ? "Not Supported" : r == 9 ? "Driver Not Loaded" : "Error"; }
Ret nvmlDeviceGetCount_v2(unsigned *n) { load(); *n = count; return 0; }
Ret nvmlDeviceGetHandleByIndex_v2(unsigned i, Handle *h) { if (i >= (unsigned)count) return 2; *h = &devices[i]; return 0; }
Ret nvmlDeviceGetName(Handle h, char *b, unsigned n) { (void)h; snprintf(b, n, "NVIDIA H200"); return 0; }
Ret nvmlDeviceGetUUID(Handle h, char *b, unsigned n) { snprintf(b, n, "GPU-stub-%d", h->index); return 0; }
Ret nvmlDeviceGetClockInfo(Handle h, int type, unsigned *mhz) { *mhz = type == 2 ? at(h)->mem : at(h)->sm; return 0; }
Ret nvmlDeviceGetMaxClockInfo(Handle h, int type, unsigned *mhz) { (void)type; *mhz = at(h)->max_sm; return 0; }
Ret nvmlDeviceGetPowerUsage(Handle h, unsigned *mw) { if (at(h)->power < 0) return 3; *mw = at(h)->power; return 0; }
Ret nvmlDeviceGetEnforcedPowerLimit(Handle h, unsigned *mw) { *mw = at(h)->limit; return 0; }
Ret nvmlDeviceGetTemperature(Handle h, int sensor, unsigned *c) { (void)sensor; *c = at(h)->temp; return 0; }
typedef struct { unsigned version; int sensor; int temperature; } TemperatureV1;
Ret nvmlDeviceGetTemperatureV(Handle h, TemperatureV1 *t) { t->temperature = at(h)->temp; return 0; }
typedef struct { unsigned gpu, memory; } Busy;
Ret nvmlDeviceGetUtilizationRates(Handle h, Busy *u) { u->gpu = at(h)->busy; u->memory = 0; return 0; }
typedef struct { unsigned long long total, free, used; } Memory;
Ret nvmlDeviceGetMemoryInfo(Handle h, Memory *m) {
    m->used = (unsigned long long)at(h)->used << 20; m->total = 141ull << 30; m->free = m->total - m->used; return 0;
}
Ret nvmlDeviceGetCurrentClocksThrottleReasons(Handle h, unsigned long long *r) { *r = at(h)->reasons; return 0; }
Ret nvmlDeviceGetCurrentClocksEventReasons(Handle h, unsigned long long *r) { *r = at(h)->reasons; return 0; }
