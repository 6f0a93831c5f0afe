// The C API of what needs no engine: the simulator, block quantisation, hashes, reports about this build and this
// machine.
#include <algorithm>
#include <string>
#include <vector>

#include "agreement/tuning.h"
#include "arithmetic/quantize.h"
#include "arithmetic/reduce.h"
#include "base/build.h"
#include "base/config.h"
#include "base/hash.h"
#include "base/topology.h"
#include "c_api.h"
#include "collective/selection.h"
#include "collective/shared/level_schedule.h"
#include "device/probe.h"
#include "horoclone_tools.h"
#include "net/mesh.h"
#include "tools/simulation.h"

using hc::guarded;
using hc::keep;
using hc::settings_of;

namespace {

hc::Status check_blocks(const hc_blocks& b) {
  if (b.version == HC_VERSION && b.block > 0 && b.shard >= 0 && b.shard % b.block == 0 && b.count >= 0 &&
      b.count <= b.shard)
    return hc::Status::ok();
  return hc::error(hc::Code::kInvalidArgument, b.count, " elements of ", b.shard, " in blocks of ", b.block,
                   " (version ", b.version, ")");
}

template <class Number>
std::string json_of(const std::vector<Number>& numbers) {
  std::string text;
  for (const Number& n : numbers) text += (text.empty() ? "" : ",") + std::to_string(n);
  return "[" + text + "]";
}
template <class Number>
std::string json_of(const std::vector<std::vector<Number>>& rows) {
  std::string text;
  for (const auto& row : rows) text += (text.empty() ? "" : ",") + json_of(row);
  return "[" + text + "]";
}

}  // namespace

extern "C" {

hc_status* hc_simulate(const hc_simulation* s, const char** json) {
  return guarded([&]() -> hc::Status {
    if (s->version != HC_VERSION)
      return hc::error(hc::Code::kInvalidArgument, "hc_simulation has version ", s->version, ", not ", HC_VERSION);
    hc::SimulationOptions o;
    o.ranks = s->ranks;
    o.ranks_per_node = s->ranks_per_node;
    o.fanout = s->fanout;
    o.tensors = s->tensors;
    o.steps = s->steps;
    o.processing = s->processing != 0;
    o.local = {s->local[0], s->local[1], s->local[2]};
    o.network = {s->network[0], s->network[1], s->network[2]};
    auto result = hc::simulate(o);
    HC_TRY(result.status());
    *json = keep(result.value().to_json());
    return hc::Status::ok();
  });
}
hc_status* hc_quantize(const hc_blocks* blocks, const float* in, float* residual, void* message) {
  return guarded([&]() -> hc::Status {
    HC_TRY(check_blocks(*blocks));
    const hc::BlockFormat format{static_cast<size_t>(blocks->block), static_cast<size_t>(blocks->shard)};
    hc::quantize(format, in, static_cast<size_t>(blocks->count), residual, static_cast<std::byte*>(message));
    return hc::Status::ok();
  });
}
hc_status* hc_dequantize(const hc_blocks* blocks, const void* message, float* out, int32_t add) {
  return guarded([&]() -> hc::Status {
    HC_TRY(check_blocks(*blocks));
    const hc::BlockFormat format{static_cast<size_t>(blocks->block), static_cast<size_t>(blocks->shard)};
    const auto count = static_cast<size_t>(blocks->count);
    hc::dequantize(format, static_cast<const std::byte*>(message), out, count, add != 0);
    return hc::Status::ok();
  });
}

void hc_hash_memory(const void* const* data, const int64_t* bytes, int32_t n, uint64_t* hashes) {
  for (int32_t i = 0; i < n; ++i) hashes[i] = hc::hash_of_bytes(data[i], static_cast<size_t>(bytes[i]));
}

void hc_locality(const char* folder, const int32_t* cpus, int32_t n, int32_t* place) {
  const std::vector<int> all(cpus, cpus + n);
  const hc::Locality found = hc::locality_of_cpus(folder ? folder : hc::kSystemFolder, all);
  place[0] = found.socket, place[1] = found.numa_node, place[2] = found.l3;
}
const char* hc_levels_report(const int32_t* places, int32_t ranks, int64_t bytes) {
  std::vector<hc::Locality> localities;
  std::vector<int> numbers, socket;
  for (int32_t r = 0; r < ranks; ++r) {
    localities.push_back({places[3 * r], places[3 * r + 1], places[3 * r + 2]});
    const auto at = std::find(numbers.begin(), numbers.end(), places[3 * r]);
    socket.push_back(static_cast<int>(at - numbers.begin()));
    if (at == numbers.end()) numbers.push_back(places[3 * r]);
  }
  if (ranks <= 0) return keep("{}");
  const hc::Levels levels = hc::levels_of(localities);
  const size_t count = static_cast<size_t>(std::max<int64_t>(bytes, 0)) / sizeof(float);
  const auto moved = [&](const hc::Levels& by) {
    return json_of(hc::bytes_between(hc::LevelSchedule::allreduce(by, ranks, count, 16), socket, sizeof(float)));
  };
  return keep(hc::text_of("{\"levels\":", json_of(levels.group), ",\"sockets\":", json_of(socket),
                          ",\"flat\":", moved({}), ",\"levelled\":", moved(levels), "}"));
}

const char* hc_knobs(void) { return keep(hc::settings_json()); }
const char* hc_build_info(void) {
  return keep(hc::text_of("{\"version\":\"", HC_VERSION_TEXT, "\",\"build\":\"", hc::build_name(),
                          "\",\"protocol\":", hc::kProtocolVersion, ",\"compiler\":\"", __VERSION__, "\",\"simd\":\"",
                          hc::simd_name(), "\",\"features\":{\"nccl\":true,\"mpi\":true}}"));
}
const char* hc_selection_report(const char* const* names, const char* const* values, int32_t n) {
  auto config = hc::Config::read(settings_of(names, values, n));
  const hc::Tuning t = hc::Tuning::of(config.is_ok() ? config.take() : hc::Config());
  return keep(hc::selection_json({t.flat_bytes, t.ring_from_bytes, t.two_level, 8}));
}
const char* hc_device_report(const char* const* names, const char* const* values, int32_t n) {
  auto config = hc::Config::read(settings_of(names, values, n));
  const hc::Config c = config.is_ok() ? config.take() : hc::Config();
  return keep(hc::device_report_json({c.cuda_library,
                                      c.nccl_library,
                                      c.nccl_folders,
                                      {c.gpu_kernels == "off", c.nvrtc_library, c.nvrtc_folders, c.kernel_cache}}));
}

}  // extern "C"
