// Chooses the schedule for a task over channels and hands it to the runner. Everything that can be wrong with the task
// is found here, before a byte moves. Thread: the one that makes progress.
#include <functional>
#include <numeric>

#include "collective/channels/schedule.h"
#include "collective/channels/schedule_runner.h"
#include "collective/collective.h"
#include "collective/selection.h"

namespace hc {
namespace {

constexpr std::byte kToken{1};  // what a barrier sends

Status invalid(const Task& task, const std::string& why) {
  return error(Code::kInvalidArgument, name_of(task.op), " over channels: ", why);
}

size_t total(const std::vector<size_t>& counts) { return std::accumulate(counts.begin(), counts.end(), size_t{0}); }

bool overlap(const std::byte* a, size_t a_bytes, const std::byte* b, size_t b_bytes) {
  const std::less<const std::byte*> before;
  return a_bytes && b_bytes && before(a, b + b_bytes) && before(b, a + a_bytes);
}

// The sizes of a task's one input and output as this rank sees them.
struct Extent {
  size_t in = 0, out = 0;  // elements
};

Status check_memory(const Task& task, const Piece& piece, Extent extent) {
  if ((extent.in && !piece.in) || (extent.out && !piece.out))
    return invalid(task, "elements are announced but no memory is given for them");
  const size_t item = size_of(task.dtype);
  if (piece.in != piece.out && overlap(piece.in, extent.in * item, piece.out, extent.out * item))
    return invalid(task, "input and output overlap in part; they must be the same memory or apart");
  return Status::ok();
}

Status check_counts(const Task& task, const std::vector<size_t>& counts, const Group& group) {
  if (counts.size() == static_cast<size_t>(group.size)) return Status::ok();
  return invalid(task, text_of(counts.size(), " counts for a group of ", group.size));
}

Status check_group(const Task& task, const Group& group) {
  const auto size = static_cast<size_t>(group.size);
  if (group.size < 1 || group.rank < 0 || group.rank >= group.size || group.channel.size() != size ||
      group.world_rank.size() != size)
    return error(Code::kInternal, name_of(task.op), " over channels: the group (rank ", group.rank, " of ", group.size,
                 ", ", group.channel.size(), " channels) does not fit together");
  for (int i = 0; i < group.size; ++i)
    if (i != group.rank && !group.channel[i])
      return Status(Code::kInternal,
                    text_of(name_of(task.op), " over channels: no channel to rank ", group.world_rank[i]),
                    group.world_rank[i]);
  return Status::ok();
}

Status check_algorithm(const Task& task, Algorithm only) {
  if (task.algorithm == Algorithm::kAuto || task.algorithm == only) return Status::ok();
  return error(Code::kUnsupported, name_of(task.op), " over channels has no algorithm ",
               static_cast<int>(task.algorithm), "; use auto (0) or ", static_cast<int>(only));
}

Status check_root(const Task& task, const Group& group) {
  if (task.root >= 0 && task.root < group.size) return Status::ok();
  return invalid(task, text_of("root ", task.root, " in a group of ", group.size));
}

Result<Schedule> allreduce_schedule(const Task& task, const Group& group) {
  for (const Piece& piece : task.pieces) HC_TRY(check_memory(task, piece, {piece.count, piece.count}));
  AllreduceShape shape{.rank = group.rank, .size = group.size, .count = task.count()};
  shape.pack = task.pieces.size() > 1;
  shape.load = shape.pack || task.scale.pre != 1.0 ? Load::kCopy : Load::kNone;
  shape.in_place = task.pieces.size() == 1 && task.pieces[0].in == task.pieces[0].out;
  shape.divisible = task.parts > 1;
  const Algorithm algorithm = choose_over_channels(task, group.size);
  if (algorithm == Algorithm::kRecursiveDoubling) return plan_recursive_doubling(shape);
  if (algorithm == Algorithm::kCirculant) return plan_circulant_allreduce(shape);
  HC_TRY(check_algorithm(task, Algorithm::kRing));
  return plan_ring_allreduce(shape);
}

Result<Schedule> broadcast_schedule(const Task& task, const Group& group) {
  HC_TRY(check_algorithm(task, Algorithm::kBinomialTree));
  HC_TRY(check_root(task, group));
  const Piece& piece = task.pieces[0];
  const bool root = group.rank == task.root;
  HC_TRY(check_memory(task, piece, {root ? piece.count : 0, piece.count}));
  return plan_broadcast({.rank = group.rank,
                         .size = group.size,
                         .root = task.root,
                         .count = piece.count,
                         .in_place = piece.in == piece.out});
}

Result<Schedule> reduce_schedule(const Task& task, const Group& group) {
  HC_TRY(check_algorithm(task, Algorithm::kBinomialTree));
  HC_TRY(check_root(task, group));
  const Piece& piece = task.pieces[0];
  HC_TRY(check_memory(task, piece, {piece.count, group.rank == task.root ? piece.count : 0}));
  return plan_reduce({.rank = group.rank,
                      .size = group.size,
                      .root = task.root,
                      .count = piece.count,
                      .load = task.scale.pre != 1.0 ? Load::kCopy : Load::kNone});
}

Result<Schedule> gather_schedule(const Task& task, const Group& group) {
  HC_TRY(check_root(task, group));
  HC_TRY(check_counts(task, task.counts, group));
  const Piece& piece = task.pieces[0];
  const size_t before = std::accumulate(task.counts.begin(), task.counts.begin() + group.rank, size_t{0});
  const bool root = group.rank == task.root;
  const bool in_place = root && piece.out && piece.in == piece.out + before * size_of(task.dtype);
  if (!in_place) HC_TRY(check_memory(task, piece, {task.counts[group.rank], root ? total(task.counts) : 0}));
  return plan_gather(group.rank, task.root, task.counts, in_place);
}

Result<Schedule> scatter_schedule(const Task& task, const Group& group) {
  HC_TRY(check_root(task, group));
  HC_TRY(check_counts(task, task.counts, group));
  const size_t in = group.rank == task.root ? total(task.counts) : 0;
  HC_TRY(check_memory(task, task.pieces[0], {in, task.counts[group.rank]}));
  return plan_scatter(group.rank, task.root, task.counts);
}

Result<Schedule> allgather_schedule(const Task& task, const Group& group) {
  HC_TRY(check_counts(task, task.counts, group));
  const Piece& piece = task.pieces[0];
  const size_t before = std::accumulate(task.counts.begin(), task.counts.begin() + group.rank, size_t{0});
  const bool in_place = piece.out && piece.in == piece.out + before * size_of(task.dtype);
  if (!in_place) {
    const Extent extent{task.counts[group.rank], total(task.counts)};
    HC_TRY(check_memory(task, piece, extent));
    if (piece.in == piece.out && extent.in)
      return invalid(task, "an input inside the output must lie at its own place in the concatenation");
  }
  const Algorithm algorithm = choose_over_channels(task, group.size);
  if (algorithm == Algorithm::kCirculant) return plan_circulant_allgather(group.rank, task.counts, in_place);
  HC_TRY(check_algorithm(task, Algorithm::kRing));
  return plan_ring_allgather(group.rank, task.counts, in_place);
}

Result<Schedule> reducescatter_schedule(const Task& task, const Group& group) {
  HC_TRY(check_counts(task, task.counts, group));
  const Piece& piece = task.pieces[0];
  HC_TRY(check_memory(task, piece, {total(task.counts), task.counts[group.rank]}));
  const bool copies = task.scale.pre != 1.0 || piece.in == piece.out;
  const Load load = copies ? Load::kCopy : Load::kNone;
  const Algorithm algorithm = choose_over_channels(task, group.size);
  if (algorithm == Algorithm::kCirculant) return plan_circulant_reducescatter(group.rank, task.counts, load);
  HC_TRY(check_algorithm(task, Algorithm::kRing));
  return plan_ring_reducescatter(group.rank, task.counts, load);
}

Result<Schedule> alltoall_schedule(const Task& task, const Group& group) {
  HC_TRY(check_algorithm(task, Algorithm::kPairwise));
  HC_TRY(check_counts(task, task.counts, group));
  HC_TRY(check_counts(task, task.received_counts, group));
  if (task.counts[group.rank] != task.received_counts[group.rank])
    return invalid(task, text_of("rank ", group.world_rank[group.rank], " sends itself ", task.counts[group.rank],
                                 " elements but receives ", task.received_counts[group.rank]));
  const Piece& piece = task.pieces[0];
  HC_TRY(check_memory(task, piece, {total(task.counts), total(task.received_counts)}));
  return plan_pairwise_alltoall({.rank = group.rank,
                                 .sent = task.counts,
                                 .received = task.received_counts,
                                 .load = piece.in == piece.out ? Load::kCopy : Load::kNone});
}

Result<Schedule> schedule_of(const Task& task, const Group& group) {
  switch (task.op) {
    case Op::kAllreduce:
      return allreduce_schedule(task, group);
    case Op::kBroadcast:
      return broadcast_schedule(task, group);
    case Op::kAllgather:
      return allgather_schedule(task, group);
    case Op::kReducescatter:
      return reducescatter_schedule(task, group);
    case Op::kAlltoall:
      return alltoall_schedule(task, group);
    case Op::kBarrier:
      return plan_dissemination_barrier(group.rank, group.size);
    case Op::kReduce:
      return reduce_schedule(task, group);
    case Op::kGather:
      return gather_schedule(task, group);
    case Op::kScatter:
      return scatter_schedule(task, group);
    case Op::kJoin:
    case Op::kSend:
    case Op::kReceive:
      break;
  }
  return error(Code::kUnsupported, name_of(task.op), " is not a collective over channels");
}

}  // namespace

Result<std::unique_ptr<Collective>> make_channel_collective(Task task, const Group& group) {
  HC_TRY(check_group(task, group));
  if (reduces(task.op) && !is_element_wise(task.reduce))
    return error(Code::kUnsupported, name_of(task.op), " over channels: Adasum is not a sum of elements");
  if (!reduces(task.op) && !task.scale.is_unit())
    return invalid(task, "only allreduce, reducescatter and reduce scale");
  if (task.op == Op::kBarrier) {
    task.dtype = DType::kU8;
    task.pieces = {Piece{&kToken, nullptr, 1}};
  } else if (task.op != Op::kAllreduce && task.pieces.size() != 1) {
    return invalid(task, text_of("has one piece, not ", task.pieces.size()));
  }
  Result<Schedule> schedule = schedule_of(task, group);
  if (!schedule.is_ok()) return schedule.status();
  Schedule steps = schedule.take();
  if (task.parts > 1) steps = part_of(steps, static_cast<int>(task.part), static_cast<int>(task.parts));
  return std::unique_ptr<Collective>(std::make_unique<ScheduleRunner>(std::move(task), group, std::move(steps)));
}

}  // namespace hc
