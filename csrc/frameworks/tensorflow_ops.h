// The list of operations, written once: their TensorFlow name, arguments and attributes, and what the kernels need.
#pragma once

#include "horoclone.h"
#include "tensorflow_api.h"

namespace hc::tensorflow {

enum class Result { kAsInput, kRows, kNumber };

struct OpSpec {
  const char* type;    // the op's name in TensorFlow
  hc_op op;            // what is submitted; unused for value ops
  Result result;       // shape: the input's, other rows than the input's, one int32
  bool grouped;        // takes and gives lists of tensors, of any types
  bool reduces;        // has reduce_op, prescale_factor, postscale_factor
  const char* output;  // the name of the (first) output
};

inline constexpr OpSpec kCollectives[] = {
    {"HorovodAllreduce", HC_ALLREDUCE, Result::kAsInput, false, true, "sum"},
    {"HorovodGroupedAllreduce", HC_ALLREDUCE, Result::kAsInput, true, true, "sum"},
    {"HorovodAllgather", HC_ALLGATHER, Result::kRows, false, false, "output"},
    {"HorovodGroupedAllgather", HC_ALLGATHER, Result::kRows, true, false, "output"},
    {"HorovodBroadcast", HC_BROADCAST, Result::kAsInput, false, false, "output"},
    {"HorovodGroupedBroadcast", HC_BROADCAST, Result::kAsInput, true, false, "output"},
    {"HorovodAlltoall", HC_ALLTOALL, Result::kRows, false, false, "output"},
    {"HorovodReducescatter", HC_REDUCESCATTER, Result::kRows, false, true, "output"},
    {"HorovodGroupedReducescatter", HC_REDUCESCATTER, Result::kRows, true, true, "output"},
    {"HorovodJoin", HC_JOIN, Result::kNumber, false, false, "last_rank"},
};
inline constexpr int kCollectiveCount = sizeof(kCollectives) / sizeof(kCollectives[0]);

// Facts about the job, read when the op runs.
// The guard is 0 in a graph, where it is the input that keeps collectives from being folded.
enum class Value { kSize, kRank, kLocalSize, kLocalRank, kIncluded, kGuard };
struct ValueSpec {
  const char* type;
  Value value;
  bool of_process_set;  // has process_set_id
  const char* output;
};
inline constexpr ValueSpec kValues[] = {
    {"HorovodSize", Value::kSize, true, "size"},
    {"HorovodRank", Value::kRank, true, "rank"},
    {"HorovodLocalSize", Value::kLocalSize, false, "local_size"},
    {"HorovodLocalRank", Value::kLocalRank, false, "local_rank"},
    {"HorovodProcessSetIncluded", Value::kIncluded, true, "included"},
    {"HorovodGuard", Value::kGuard, false, "guard"},
};
inline constexpr int kValueCount = sizeof(kValues) / sizeof(kValues[0]);

// hc_dtype of a TF_DataType; -1: none of ours.
int32_t dtype_of(int type);

// Both give the first problem, or an empty text.
std::string register_ops();
std::string register_kernels();

}  // namespace hc::tensorflow
