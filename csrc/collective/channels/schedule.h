// A schedule is one rank's part of a collective over channels, as data: which element ranges it sends, receives,
// reduces and copies, and what each of these waits for. The functions here are pure (no memory, channel or clock), so
// schedules are printed and tested without I/O; schedule_runner.h executes them. Thread: any; a Schedule is a value.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace hc {

// Where an element lies. Input and output are the task's; with several pieces they are not contiguous, and only kCopy
// may touch them. Scratch belongs to the runner.
enum class Place : uint8_t { kInput, kOutput, kScratch };

struct Spot {
  Place place = Place::kOutput;
  size_t first = 0;  // element
};

enum class Action : uint8_t {
  kSend,     // `from` leaves to `peer`
  kReceive,  // what `peer` sends lands in `to`
  kReduce,   // `to` = what `peer` sends, op `from`; it lands in staging memory first
  kCopy,     // `to` = `from`
  kGate,     // nothing moves: complete as far as the owner has released the range at `from`
};

// Neighbouring steps of a schedule; none where last < first.
struct StepRange {
  int first = 0, last = -1;
};

// How a schedule runs. Every step is cut into segments of the same number of elements (the last one shorter) and works
// them off in order. Sends to one peer follow the order of the list, receives (kReceive, kReduce) from one peer too,
// local steps (kCopy, kGate) too; otherwise only `after` and `after_all` order things:
//   segment i may begin when segments 0 .. min(i, last) of every step in `after`, and every step of `after_all`, are
//   complete.
// A send is complete when its bytes have left, a receive when they are there, a reduction when `to` is written. A
// kReduce only delays the arithmetic by this, not the receiving; a kReceive delays the receiving, as it lands in `to`.
struct Step {
  Action action = Action::kCopy;
  int peer = -1;  // group rank
  int round = 0;  // 1 .. Schedule::rounds, for messages; local steps 0
  size_t count = 0;
  Spot from{}, to{};
  bool incoming_first = true;  // kReduce: the order of the two operands, the same on every rank for one sum
  bool prescale = false;       // kCopy: times Scale::pre
  bool finish = false;         // kReduce, kCopy: then Scale::post and divisor; exactly once per element in the group
  std::array<int, 3> after{-1, -1, -1};
  StepRange after_all{};
};

struct Schedule {
  const char* name = "";
  int rounds = 0;
  size_t scratch_count = 0;
  std::vector<Step> steps{};

  // Appends and returns the index; a step of no elements vanishes (-1), on both sides alike.
  int add(const Step& step);
};

// What must be done before the input can be used.
enum class Load : uint8_t {
  kNone,  // usable where it lies
  kCopy,  // first copied (and prescaled) to where the work is done
  kGate,  // in place, but only as far as the owner has released it
};

struct AllreduceShape {
  int rank = 0;
  int size = 1;
  size_t count = 0;
  Load load = Load::kNone;
  bool pack = false;      // several pieces: work in scratch, copy to the output at the end. Needs Load::kCopy
  bool in_place = false;  // the input is the output
  bool divisible = true;  // no step has more than one chunk, which part_of needs; circulant only, the others never have
};

// Ring: 2(size-1) rounds, 2(size-1)/size of the buffer each way, whatever the size. Chunk c is summed in the order
// c+1, c+2, .., c; so its result depends on the layout only.
Schedule plan_ring_allreduce(const AllreduceShape& shape);
// Recursive doubling: log2(size) rounds of the whole buffer, for few elements. Sizes that are no power of two reduce
// the first ranks in pairs before and after (two rounds more). Sums form a fixed tree in rank order.
Schedule plan_recursive_doubling(const AllreduceShape& shape);

// Circulant graph: the ring's bytes in 2 ceil(log2(size)) rounds, for any size; a round's messages wait for the round
// before, so a ring is faster where chunks are long. Chunk c is summed on rank c; its order depends on the layout only.
// J. L. Traeff, "Optimal, non-pipelined reduce-scatter and allreduce algorithms", arXiv:2410.14234 (2024).
Schedule plan_circulant_allreduce(const AllreduceShape& shape);

// Binomial tree: log2(size) rounds; every segment is forwarded as soon as it is there.
struct BroadcastShape {
  int rank = 0;
  int size = 1;
  int root = 0;
  size_t count = 0;
  bool in_place = false;
};
Schedule plan_broadcast(const BroadcastShape& shape);

// Binomial tree, log2(size) rounds, the broadcast's tree backwards. Partial sums of inner nodes live in scratch; a
// fixed tree in the order of ranks counted from the root. load: kNone or kCopy (prescaling).
struct ReduceShape {
  int rank = 0;
  int size = 1;
  int root = 0;
  size_t count = 0;
  Load load = Load::kNone;
};
Schedule plan_reduce(const ReduceShape& shape);

// Every rank's part travels directly to or from the root, so each byte crosses the wire once. in_place: the root's own
// part is already in its place.
Schedule plan_gather(int rank, int root, std::span<const size_t> counts, bool in_place);
Schedule plan_scatter(int rank, int root, std::span<const size_t> counts);

// Ring, size-1 rounds; counts[i] elements from rank i, output their concatenation. in_place: the input lies in the
// output already.
Schedule plan_ring_allgather(int rank, std::span<const size_t> counts, bool in_place);
// Ring, size-1 rounds; input the concatenation of counts[i] elements for rank i, output this rank's. load kCopy: works
// on a copy of the whole input (prescaling, or an output that overlaps the input).
Schedule plan_ring_reducescatter(int rank, std::span<const size_t> counts, Load load);
// Either half of the circulant allreduce, ceil(log2(size)) rounds. Arguments as above.
Schedule plan_circulant_allgather(int rank, std::span<const size_t> counts, bool in_place);
Schedule plan_circulant_reducescatter(int rank, std::span<const size_t> counts, Load load);

// Pairwise exchange: round k sends to rank+k and receives from rank-k. load kCopy: an output that overlaps the input.
struct AlltoallShape {
  int rank = 0;
  std::span<const size_t> sent;      // [size]
  std::span<const size_t> received;  // [size]
  Load load = Load::kNone;
};
Schedule plan_pairwise_alltoall(const AlltoallShape& shape);

// Dissemination: ceil(log2(size)) rounds of one element, which is the input's first; any bytes will do.
Schedule plan_dissemination_barrier(int rank, int size);

// One schedule that does `parts` one after the other, each on its own `first` .. of input and output. They overlap in
// time as far as their order per peer allows. No part may use scratch. begin: out, index of each part's first step.
struct PlacedSchedule {
  Schedule schedule;
  size_t first = 0;
};
Schedule concatenate(std::span<const PlacedSchedule> parts, std::vector<int>* begin);

// Part `part` of `parts`: the same fraction of every step's elements, so that each element takes the same path as in
// the whole schedule.
Schedule part_of(const Schedule& schedule, int part, int parts);

// First element of chunk c of `chunks` nearly equal ones; c = chunks gives count.
size_t chunk_begin(size_t count, int chunks, int c);

}  // namespace hc
