/* A tool as NVIDIA's are: loaded through NVTX_INJECTION64_PATH, it takes ranges of the domain "horoclone" and writes what
 * it has heard into the file that HC_TEST_NVTX names. Compiled against NVIDIA's own headers. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "nvToolsExt.h"

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static __thread int depth;
static uint64_t started;
static int domain;

static void note(const char* what, const char* text) {
  FILE* to = fopen(getenv("HC_TEST_NVTX"), "a");
  if (!to) abort();
  fprintf(to, "%s\t%s\n", what, text);
  fclose(to);
}

static void check(nvtxDomainHandle_t of, const nvtxEventAttributes_t* a) {
  if ((void*)of != (void*)&domain || a->version != NVTX_VERSION || a->size != sizeof *a) abort();
  if (a->messageType != NVTX_MESSAGE_TYPE_ASCII || a->payloadType != NVTX_PAYLOAD_UNKNOWN) abort();
}

static nvtxDomainHandle_t NVTX_API create(const char* name) {
  note("domain", name);
  return (nvtxDomainHandle_t)&domain;
}
static nvtxRangeId_t NVTX_API start(nvtxDomainHandle_t of, const nvtxEventAttributes_t* a) {
  check(of, a);
  pthread_mutex_lock(&lock);
  uint64_t id = ++started;
  note("start", a->message.ascii);
  pthread_mutex_unlock(&lock);
  return id;
}
static void NVTX_API end(nvtxDomainHandle_t of, nvtxRangeId_t range) {
  if ((void*)of != (void*)&domain || range == 0) abort();
  pthread_mutex_lock(&lock);
  note("end", "");
  pthread_mutex_unlock(&lock);
}
static int NVTX_API push(nvtxDomainHandle_t of, const nvtxEventAttributes_t* a) {
  check(of, a);
  pthread_mutex_lock(&lock);
  note("push", a->message.ascii);
  pthread_mutex_unlock(&lock);
  return depth++;
}
static int NVTX_API pop(nvtxDomainHandle_t of) {
  (void)of;
  if (depth <= 0) abort();
  pthread_mutex_lock(&lock);
  note("pop", "");
  pthread_mutex_unlock(&lock);
  return --depth;
}

int InitializeInjectionNvtx2(NvtxGetExportTableFunc_t get) {
  const NvtxExportTableVersionInfo* version = get(NVTX_ETID_VERSIONINFO);
  const NvtxExportTableCallbacks* tables = get(NVTX_ETID_CALLBACKS);
  NvtxFunctionTable core2 = NULL, cuda = NULL;
  unsigned size = 0;
  if (!version || version->struct_size != sizeof *version || version->version != NVTX_VERSION) return 0;
  version->SetInjectionNvtxVersion(NVTX_VERSION);
  if (!tables || tables->struct_size != sizeof *tables) return 0;
  if (tables->GetModuleFunctionTable(NVTX_CB_MODULE_CUDA, &cuda, &size)) return 0;
  if (!tables->GetModuleFunctionTable(NVTX_CB_MODULE_CORE2, &core2, &size) || size < NVTX_CBID_CORE2_SIZE) return 0;
  for (unsigned i = 1; i < NVTX_CBID_CORE2_SIZE; ++i)
    if (!core2[i]) return 0;
  *core2[NVTX_CBID_CORE2_DomainCreateA] = (NvtxFunctionPointer)create;
  *core2[NVTX_CBID_CORE2_DomainRangeStartEx] = (NvtxFunctionPointer)start;
  *core2[NVTX_CBID_CORE2_DomainRangeEnd] = (NvtxFunctionPointer)end;
  *core2[NVTX_CBID_CORE2_DomainRangePushEx] = (NvtxFunctionPointer)push;
  *core2[NVTX_CBID_CORE2_DomainRangePop] = (NvtxFunctionPointer)pop;
  return 1;
}
