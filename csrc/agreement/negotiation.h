// The data types of the agreement: what one rank announces (a request, a request list) and what the coordinator answers
// (a plan). Values only; negotiation.cc encodes them. A grouped operation is ONE request with several tensors, so
// all-or-nothing needs no further rule. Process set and generation precede every request list and plan on the wire.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "agreement/tuning.h"
#include "base/clock.h"
#include "base/dtype.h"
#include "base/status.h"
#include "base/wire.h"

namespace hc {

inline constexpr uint32_t kNoCacheId = 0xffffffffu;
inline constexpr uint32_t kMaxCacheIds = 1u << 16;   // a decoder refuses larger cache id
inline constexpr size_t kMaxPlanEntries = 1u << 16;  // in one plan; what is left goes into the next
inline constexpr size_t kMaxDimensions = 64;         // of a tensor
inline constexpr size_t kMaxTextBytes = 64u << 10;   // a name or an error text
inline constexpr uint32_t kMaxParts = 1u << 16;      // of one batch
inline constexpr int64_t kMaxTensorBytes = int64_t{1} << 60;

struct TensorMeta {
  DType dtype = DType::kF32;
  std::vector<int64_t> shape;
  bool operator==(const TensorMeta&) const = default;
  int64_t count() const {
    int64_t n = 1;
    for (int64_t d : shape) n *= d;
    return n;
  }
};

// Everything about an operation that ranks must agree on or tell each other. When a signature repeats, its cache id is
// sent instead.
struct Signature {
  Op op = Op::kAllreduce;
  Reduce reduce = Reduce::kSum;
  uint8_t device = 0;     // 0 host, 1 CUDA
  bool in_arena = false;  // to be reduced where it lies, in this rank's arena; may differ between ranks
  int32_t root = 0;       // group rank (broadcast), else 0
  int32_t priority = 0;   // higher runs before lower; may differ between ranks: the lowest rank's counts
  int32_t left_out = 0;   // allreduce of an optimizer: steps of this rank without it since the last one
  double prescale = 1.0;
  double postscale = 1.0;
  std::vector<TensorMeta> tensors;  // 1 .. n; barrier and join: none
  std::vector<int64_t> splits;      // alltoall: rows sent to each group rank; may differ between ranks
  bool operator==(const Signature&) const = default;
};

// "float32[2,3]"
std::string text_of_tensor(const TensorMeta& meta);
// Bytes of all tensors; saturates instead of overflowing.
size_t bytes_of(const TensorMeta& tensor);
size_t bytes_of(const Signature& signature);

// One operation as one rank submitted it. The name is the key (with the op kind: "allreduce.NAME"); an unnamed one has
// an empty name and its sequence number among the unnamed operations of its kind in this process set.
struct Request {
  std::string name;
  uint64_t sequence = 0;
  Signature signature;
};

// "The same as I last announced for this cache id" (named), or "number `sequence`, with this cache id's signature"
// (unnamed).
struct CachedRequest {
  uint32_t cache_id = kNoCacheId;
  uint64_t sequence = 0;
  bool operator==(const CachedRequest&) const = default;
};

// One rank's announcements since its last request list. In a tree: what a rank and all ranks below it have announced
// alike.
struct RequestList {
  uint64_t generation = 0;
  uint16_t process_set = 0;
  int32_t rank = 0;  // group rank
  std::vector<CachedRequest> cached;
  std::vector<Request> fresh;
  // This rank has no more data: it counts as ready for every allreduce and barrier until all ranks have joined. It is
  // sent once per join, possibly together with this rank's last announcements; the rank announces nothing more until
  // the join is over.
  bool joined = false;
  bool whole = false;      // for all of the subtree of `rank` (control_tree.h)
  int32_t last = 0;        // whole: who of them was the last to announce it
  uint32_t held_us = 0;    // how long relays have held the first of these announcements
  bool on_bypass = false;  // this rank has an open session of the bypass and has entered a round
};

struct PlanEntry {
  uint32_t cache_id = kNoCacheId;  // kNoCacheId: not remembered (cache full or off)
  uint64_t sequence = 0;           // unnamed entries
  std::string name;  // set when the cache id is new to the ranks (or there is none) and the entry is named
  bool unnamed = false;
  bool assigned = false;  // the cache id was given in this plan: learn it
  // A rank that has joined gives the identity element, which is not prescaled (BatchRunner::scales_before).
  bool with_joined = false;
  // With `assigned`, or while a rank is joined: what a rank that did not submit this entry needs in order to take part.
  bool has_signature = false;
  Signature signature;
  // Only in an error that is decided before everybody has announced the entry (a rank left; one name, two operations):
  // the group ranks whose announcement fails. Other ranks keep theirs. Empty: every rank that submitted it.
  std::vector<int32_t> failed_on;
};

// A large batch runs in parts, each a batch of the plan, so that something urgent can run between them. The first part
// names the entries; the later ones only refer to it. The operations are done when the last part is.
struct Part {
  uint32_t index = 0;
  uint32_t count = 1;  // 1: the batch is not cut
  uint32_t first = 0;  // id of the batch with part 0
  bool operator==(const Part&) const = default;
};

// Entries that one collective (per dtype) executes, or that fail together.
struct PlanBatch {
  uint32_t id = 0;  // counts up per process set
  Op op = Op::kAllreduce;
  Algorithm algorithm = Algorithm::kAuto;
  bool in_arena = false;   // every rank announced it so
  bool on_device = false;  // the tensors lie in the memory of a GPU
  std::vector<PlanEntry> entries;
  // allgather, reducescatter: rows (first dimension) of each group rank, tensor by tensor ([tensor * size + rank]).
  // alltoall: the full table of rows, [sender * size + receiver].
  std::vector<int64_t> rows;
  int32_t last_joined = -1;  // op join: group rank that joined last
  Part part;
  Code error = Code::kOk;  // not ok: no data moves, every entry fails with `error_text`
  std::string error_text;
  // Not encoded, used on this rank only: when the plan arrived, while a timeline is written, and the settings then in
  // force.
  TimePoint planned{};
  Tuning tuning{};
};

// Tickets that rank 0 has given outside of plans to each of a run of ranks (launch_tickets.h).
struct TicketsBefore {
  uint32_t first = 0, ranks = 0, tickets = 0;
  bool operator==(const TicketsBefore&) const = default;
};

struct Plan {
  uint64_t generation = 0;
  uint16_t process_set = 0;
  std::optional<Tuning> tuning;          // in force for these batches and the later ones
  std::optional<uint64_t> bypass_round;  // a session of the bypass is open from now on, with this round first
  std::vector<PlanBatch> batches;
  std::vector<TicketsBefore> tickets;  // between the last plan with work on GPUs and this one, by rank
};

void encode(const RequestList& request_list, Writer* out);
Status decode(Reader* in, RequestList* request_list);
void encode(const Plan& plan, Writer* out);
Status decode(Reader* in, Plan* plan);

}  // namespace hc
