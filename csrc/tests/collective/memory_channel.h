// An in-memory link between two ranks for tests: keeps every promise of channel.h, but moves only a random few bytes
// per call, so that partial transfers, interleaved streams and early segments really happen. Can be told to break.
#pragma once

#include <algorithm>
#include <array>
#include <cstring>
#include <deque>
#include <list>
#include <map>
#include <memory>
#include <random>

#include "net/channel.h"

namespace hc {

// One direction. A fragment is what one progress call put on the wire.
struct MemoryWire {
  struct Fragment {
    Tag tag;
    size_t total = 0;  // bytes of the whole transfer
    size_t at = 0;     // where these bytes belong in it
    std::vector<std::byte> bytes;
  };
  std::deque<Fragment> fragments;
  size_t bytes = 0;
  bool broken = false;
};

class MemoryChannel final : public Channel {
 public:
  MemoryChannel(std::shared_ptr<MemoryWire> out, std::shared_ptr<MemoryWire> in, std::mt19937* random, size_t most)
      : out_(std::move(out)), in_(std::move(in)), random_(random), most_(most) {}

  // As soon as this many more bytes have been received, the peer is gone.
  void break_after(size_t bytes) { budget_ = bytes; }
  size_t posted() const { return sends_.size() + receives_.size(); }
  // Nothing sent by the peer is left over.
  bool drained() const { return in_->fragments.empty() && early_.empty(); }

  Status send(std::span<const uint8_t>) override { return error(Code::kUnsupported, "no control frames here"); }
  bool receive(std::vector<uint8_t>*) override { return false; }

  void post_send(Transfer* t) override { sends_.push_back(t); }
  void post_receive(Transfer* t) override {
    auto early = std::find_if(early_.begin(), early_.end(), [&](const Early& e) { return e.tag.same_stream(t->tag); });
    if (early != early_.end()) {
      if (!accept(t, early->tag, early->total)) return;
      std::memcpy(t->data, early->bytes.data(), early->bytes.size());
      t->moved = early->bytes.size();
      t->done = t->moved == t->bytes;
      early_.erase(early);
      if (t->done) return;
      current_ = t;  // it is the segment on the wire; the rest goes straight to the transfer
    }
    receives_.push_back(t);
  }
  void forget(Transfer* t) override {
    if (t->moved) out_->broken = in_->broken = true;
    std::erase(sends_, t);
    std::erase(receives_, t);
    if (current_ == t) current_ = nullptr;
  }

  Status progress(bool* moved) override {
    if (in_->broken) return error(Code::kPeerLost, "the link broke");
    push(moved);
    while ((*random_)() % 4 && pull(moved)) {
    }
    return mismatch_;
  }
  bool flushed() override { return sends_.empty(); }

 private:
  struct Early {
    Tag tag;
    size_t total = 0;
    std::vector<std::byte> bytes;
  };

  void push(bool* moved) {
    if (sends_.empty() || out_->bytes >= 4 * most_) return;  // the wire holds only so much
    Transfer* t = sends_.front();
    const size_t n = std::min(t->bytes - t->moved, 1 + (*random_)() % most_);
    out_->fragments.push_back({t->tag, t->bytes, t->moved, {t->data + t->moved, t->data + t->moved + n}});
    out_->bytes += n;
    t->moved += n;
    *moved = true;
    if (t->moved < t->bytes) return;
    t->done = true;
    sends_.pop_front();
  }

  bool pull(bool* moved) {
    if (in_->fragments.empty()) return false;
    MemoryWire::Fragment f = std::move(in_->fragments.front());
    in_->fragments.pop_front();
    in_->bytes -= f.bytes.size();
    *moved = true;
    if (f.bytes.size() > budget_) return snap();
    if (f.at == 0) begin(f);
    if (!mismatch_.is_ok()) return false;
    take(f);
    if (budget_ != SIZE_MAX) budget_ -= f.bytes.size();
    return budget_ > 0 || snap();
  }
  bool snap() {
    in_->broken = out_->broken = true;
    mismatch_ = error(Code::kPeerLost, "the link broke");
    return false;
  }
  void take(const MemoryWire::Fragment& f) {
    if (!current_) {
      early_.back().bytes.insert(early_.back().bytes.end(), f.bytes.begin(), f.bytes.end());
      return;
    }
    std::memcpy(current_->data + f.at, f.bytes.data(), f.bytes.size());
    current_->moved += f.bytes.size();
    if (current_->moved < current_->bytes) return;
    current_->done = true;
    std::erase(receives_, current_);
    current_ = nullptr;
  }
  void begin(const MemoryWire::Fragment& f) {
    current_ = nullptr;
    uint64_t& expected = next_[{f.tag.generation, f.tag.process_set, f.tag.batch}];
    if (f.tag.offset != expected++) mismatch_ = error(Code::kInternal, "transfer ", f.tag.offset, " is out of turn");
    for (Transfer* t : receives_)
      if (t->tag.same_stream(f.tag)) {
        if (accept(t, f.tag, f.total)) current_ = t;
        return;
      }
    early_.push_back({f.tag, f.total, {}});
  }
  bool accept(const Transfer* t, const Tag& tag, size_t total) {
    if (t->tag.offset == tag.offset && t->bytes == total) return true;
    mismatch_ = error(Code::kInternal, "transfer ", tag.offset, " of ", total, " bytes meets a receive of transfer ",
                      t->tag.offset, " of ", t->bytes, " bytes");
    return false;
  }

  std::shared_ptr<MemoryWire> out_, in_;
  std::mt19937* random_;
  const size_t most_;  // bytes per progress call
  size_t budget_ = SIZE_MAX;
  std::deque<Transfer*> sends_, receives_;
  std::list<Early> early_;
  std::map<std::array<uint32_t, 3>, uint64_t> next_;  // the offset that a stream's next segment must carry
  Transfer* current_ = nullptr;                       // where the rest of the segment on the wire goes
  Status mismatch_;
};

// N ranks, everybody linked with everybody.
class MemoryMesh {
 public:
  MemoryMesh(int size, unsigned seed, size_t most = 256) : random(seed), size_(size), links_(size * size) {
    for (int a = 0; a < size; ++a)
      for (int b = a + 1; b < size; ++b) {
        auto there = std::make_shared<MemoryWire>(), back = std::make_shared<MemoryWire>();
        links_[a * size + b] = std::make_unique<MemoryChannel>(there, back, &random, most);
        links_[b * size + a] = std::make_unique<MemoryChannel>(back, there, &random, most);
      }
  }
  MemoryChannel* link(int from, int to) { return links_[from * size_ + to].get(); }
  int size() const { return size_; }
  bool quiet() const {
    return std::all_of(links_.begin(), links_.end(), [](auto& l) { return !l || (l->posted() == 0 && l->drained()); });
  }

  std::mt19937 random;

 private:
  int size_;
  std::vector<std::unique_ptr<MemoryChannel>> links_;
};

}  // namespace hc
