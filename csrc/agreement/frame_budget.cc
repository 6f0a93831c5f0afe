#include "agreement/frame_budget.h"

#include <utility>

namespace hc {
namespace {

constexpr size_t kNumberBytes = 10;  // a varint of 64 bits
constexpr size_t kFieldBytes = 64;   // all of an object that has one size

size_t encoded_bytes(const Request& request) {
  return request.name.size() + kFieldBytes + hc::encoded_bytes(request.signature);
}

}  // namespace

size_t encoded_bytes(const Signature& signature) {
  size_t bytes = kFieldBytes + kNumberBytes * signature.splits.size();
  for (const TensorMeta& t : signature.tensors) bytes += kNumberBytes * (2 + t.shape.size());
  return bytes;
}

size_t encoded_bytes(const RequestList& request_list) {
  size_t bytes = kFieldBytes + 2 * kNumberBytes * request_list.cached.size();
  for (const Request& r : request_list.fresh) bytes += encoded_bytes(r);
  return bytes;
}

std::vector<RequestList> parts_of(RequestList request_list, size_t most) {
  std::vector<RequestList> parts;
  if (encoded_bytes(request_list) <= most) {
    parts.push_back(std::move(request_list));
    return parts;
  }
  std::vector<Request> fresh = std::exchange(request_list.fresh, {});
  const bool joined = std::exchange(request_list.joined, false);  // said with the last announcements
  size_t bytes = encoded_bytes(request_list);
  parts.push_back(std::move(request_list));
  for (Request& r : fresh) {
    const size_t more = encoded_bytes(r);
    if (bytes + more > most && !(parts.back().fresh.empty() && parts.back().cached.empty())) {
      RequestList& next = parts.emplace_back();
      const RequestList& first = parts.front();
      next.generation = first.generation;
      next.process_set = first.process_set;
      next.rank = first.rank;
      next.whole = first.whole;
      next.last = first.last;
      next.held_us = first.held_us;
      next.on_bypass = first.on_bypass;
      bytes = kFieldBytes;
    }
    parts.back().fresh.push_back(std::move(r));
    bytes += more;
  }
  parts.back().joined = joined;
  return parts;
}

}  // namespace hc
