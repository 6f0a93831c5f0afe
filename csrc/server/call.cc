#include "server/call.h"

#include <cstring>
#include <utility>

namespace hc {

Call::Call(Verb verb, uint32_t partitions, uint64_t table, uint32_t flags, const Rows& rows)
    : verb_(verb), table_(table), flags_(flags), rows_(rows), parts_(partitions), clocks_(partitions, 0) {
  std::vector<uint32_t> counts(partitions, 0), where(rows.ids.size());
  for (size_t i = 0; i < rows.ids.size(); ++i) ++counts[where[i] = partition_of(rows.ids[i], partitions)];
  for (uint32_t p = 0; p < partitions; ++p) parts_[p].ids.reserve(counts[p]), parts_[p].places.reserve(counts[p]);
  for (size_t i = 0; i < rows.ids.size(); ++i) {
    parts_[where[i]].ids.push_back(rows.ids[i]);
    parts_[where[i]].places.push_back(static_cast<uint32_t>(i));
  }
  // A pull, or rows that are set, concern only who has some. A push is a step of every partition.
  if (verb == Verb::kPush) return;
  for (Part& part : parts_) part.done = part.ids.empty();
}

Call::Call(Verb verb, uint32_t partitions, uint64_t table, std::vector<uint8_t> payload)
    : verb_(verb), table_(table), payload_(std::move(payload)), parts_(partitions), clocks_(partitions, 0) {}

FrameHeader Call::header(uint32_t partition) const {
  FrameHeader header;
  header.verb = verb_;
  header.partition = partition;
  header.flags = flags_;
  header.table = table_;
  header.sequence = sequence_;
  header.clock = clocks_[partition];
  header.count = parts_[partition].ids.size();
  return header;
}

std::span<const uint8_t> Call::ids(uint32_t partition) const {
  if (!payload_.empty()) return payload_;
  const std::vector<int64_t>& ids = parts_[partition].ids;
  return {reinterpret_cast<const uint8_t*>(ids.data()), ids.size() * sizeof(int64_t)};
}

std::span<const uint8_t> Call::values(uint32_t partition, Buffer* scratch) const {
  if (!rows_.in) return {};
  const std::vector<uint32_t>& places = parts_[partition].places;
  const size_t row_bytes = rows_.floats * sizeof(float);
  uint8_t* to = scratch->sized(places.size() * row_bytes);
  for (size_t i = 0; i < places.size(); ++i)
    std::memcpy(to + i * row_bytes, rows_.in + static_cast<size_t>(places[i]) * rows_.floats, row_bytes);
  return scratch->bytes();
}

Status Call::take(uint32_t partition, const FrameHeader& header, std::span<const uint8_t> payload) {
  Part& part = parts_[partition];
  if (rows_.out) {
    const size_t row_bytes = rows_.floats * sizeof(float);
    if (payload.size() != part.places.size() * row_bytes)
      return error(Code::kInternal, "partition ", partition, " answered ", part.places.size(), " ids with ",
                   payload.size(), " bytes; rows of ", rows_.floats, " numbers were expected");
    for (size_t i = 0; i < part.places.size(); ++i)
      std::memcpy(rows_.out + static_cast<size_t>(part.places[i]) * rows_.floats, payload.data() + i * row_bytes,
                  row_bytes);
  }
  if (verb_ == Verb::kRegister) clocks_[partition] = header.clock;
  part.done = true;
  return Status::ok();
}

}  // namespace hc
