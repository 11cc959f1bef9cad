/* NVIDIA's driver library, as far as jtrain.profile.clocks.nvml asks it: three GPUs, number i at 1000 + i MHz.
   FAKE_NVML_REFUSE names a function that answers "not supported", or @N for field N. */
#include <stdlib.h>
#include <string.h>

typedef struct { unsigned int field, scope; long long timestamp, latency; unsigned int type; int result; union { double d; unsigned int ui; unsigned long long ull; } value; } Field;
typedef struct { unsigned long long reference, violation; } Violation;
typedef struct { unsigned int version, sensor; int temperature; } Temperature;

static int refused(const char *name) {
  const char *list = getenv("FAKE_NVML_REFUSE");
  return list && strcmp(list, name) == 0 ? 3 : 0;
}
static unsigned int number(void *device) { return (unsigned int)(size_t)device - 100; }

int nvmlInitWithFlags(unsigned int flags) { return refused("nvmlInitWithFlags"); }
int nvmlInit_v2(void) { return refused("nvmlInitWithFlags"); }
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int result) { return result == 3 ? "Not Supported" : "Fake Error"; }
int nvmlDeviceGetHandleByIndex_v2(unsigned int index, void **device) {
  if (index >= 3) return 2;
  *device = (void *)(size_t)(100 + index);
  return refused("nvmlDeviceGetHandleByIndex_v2");
}
int nvmlDeviceGetHandleByUUID(const char *uuid, void **device) { *device = (void *)102; return strcmp(uuid, "GPU-2") ? 2 : 0; }
int nvmlDeviceGetMaxClockInfo(void *device, unsigned int type, unsigned int *mhz) { *mhz = 1980; return refused("nvmlDeviceGetMaxClockInfo"); }
int nvmlDeviceGetClockInfo(void *device, unsigned int type, unsigned int *mhz) {
  *mhz = (type == 1 ? 1000 : 2000) + number(device);
  return refused("nvmlDeviceGetClockInfo");
}
int nvmlDeviceGetCurrentClocksEventReasons(void *device, unsigned long long *reasons) { *reasons = 0x24; return refused("nvmlDeviceGetCurrentClocksEventReasons"); }
int nvmlDeviceGetFieldValues(void *device, int count, Field *fields) {
  for (int i = 0; i < count; i++) { fields[i].result = refused("@186"); fields[i].value.ui = fields[i].field == 186 ? 650000 : 0; }
  return refused("nvmlDeviceGetFieldValues");
}
int nvmlDeviceGetPowerUsage(void *device, unsigned int *mw) { *mw = 600000; return refused("nvmlDeviceGetPowerUsage"); }
int nvmlDeviceGetTemperatureV(void *device, Temperature *t) { t->temperature = 61; return refused("nvmlDeviceGetTemperatureV"); }
int nvmlDeviceGetTotalEnergyConsumption(void *device, unsigned long long *mj) { *mj = 5000; return refused("nvmlDeviceGetTotalEnergyConsumption"); }
int nvmlDeviceGetViolationStatus(void *device, unsigned int policy, Violation *v) { v->violation = 7 + policy; return refused("nvmlDeviceGetViolationStatus"); }
