// How this rank sleeps and is woken: the word that tells others whether it sleeps, and the eventfd that ends its sleep.
// A Doorbell (shm_channel.h) is a peer's view of it. A rank that stores news looks at the word; a rank that goes to
// sleep stores the word and looks for news; so at least one of the two sees the other.
//
// Thread: the thread that makes progress; is_awake and ring from any. Owner: the mesh.
#pragma once

#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <thread>

#include "net/mesh.h"
#include "net/socket.h"

namespace hc {

class OwnDoorbell {
 public:
  // False: there is no eventfd, errno says why.
  bool open();
  int fd() const { return fd_.get(); }
  // From now on the word lies here, in shared memory where peers see it; null: in this object.
  void move_word(std::atomic<uint32_t>* asleep) { asleep_ = asleep ? asleep : &own_word_; }

  // Sets the word; after kAsleep* the caller must look at every source of work once more before it sleeps.
  // A peer's Doorbell and this are the two halves of one agreement: each stores, then looks at what the other stores.
  void set_asleep(Sleep state) {
    const auto word = static_cast<uint32_t>(state);
    if (state == Sleep::kAwake) {
      asleep_->store(word, std::memory_order_relaxed);
      return;
    }
    asleep_->exchange(word, std::memory_order_seq_cst);
#ifndef __SANITIZE_THREAD__  // which does not know fences; there Doorbell uses a read-modify-write of this word
    std::atomic_thread_fence(std::memory_order_seq_cst);
#endif
  }
  // Whether the word says kAwake: set so, or by whoever has rung.
  bool is_awake() const { return asleep_->load(std::memory_order_seq_cst) == 0; }
  // The same for the sleeper itself, which needs no order with what others store.
  bool says_awake() const { return asleep_->load(std::memory_order_relaxed) == 0; }

  // Ends this rank's own sleep, also one that is about to begin. Any thread; async-signal-safe.
  void ring() {
    ring_pending_.store(1, std::memory_order_seq_cst);
    if (asleep_->exchange(static_cast<uint32_t>(Sleep::kAwake), std::memory_order_seq_cst) == 0) return;
    const int saved = errno;
    const uint64_t one = 1;
    ringing_.fetch_add(1, std::memory_order_seq_cst);
    if (const int number = number_.load(std::memory_order_seq_cst); number >= 0) {
      [[maybe_unused]] ssize_t written = ::write(number, &one, sizeof(one));
    }
    ringing_.fetch_sub(1, std::memory_order_seq_cst);
    errno = saved;
  }
  // Whether somebody has called ring() since the last sleep; forgets it.
  bool take_ring() { return ring_pending_.exchange(0, std::memory_order_seq_cst) != 0; }
  // The sleep that ring() was to end has ended.
  void forget_ring() { ring_pending_.store(0, std::memory_order_seq_cst); }

  // clear() empties the eventfd after a sleep; stay_readable() rings it, so that every thread that sleeps on it
  // returns.
  void clear();
  void stay_readable();

  // From now on ring() does nothing; the eventfd may still be rung by peers, until close().
  void disconnect() { number_.store(-1); }
  // In a forked child, which has none of the threads that may have been in ring().
  void forget() { ringing_.store(0); }
  // After disconnect(). The number may be another file's at once: a thread that has read it is waited for.
  void close() {
    while (ringing_.load(std::memory_order_seq_cst) != 0) std::this_thread::yield();
    fd_.reset();
  }

 private:
  Fd fd_;
  std::atomic<int> number_{-1};  // of fd_, for ring() from any thread
  std::atomic<int> ringing_{0};  // threads that may be about to write to it
  std::atomic<uint32_t> own_word_{0};
  std::atomic<uint32_t>* asleep_ = &own_word_;  // what Sleep says
  std::atomic<uint32_t> ring_pending_{0};       // outlives the moment between the last look for work and the sleep
};

}  // namespace hc
