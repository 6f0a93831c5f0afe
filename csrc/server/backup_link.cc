#include "server/backup_link.h"

#include <chrono>

namespace hc {

BackupLink::BackupLink(std::unique_ptr<Connection> connection, int32_t server, double silence_s,
                       std::function<void()> lost)
    : connection_(std::move(connection)), server_(server), silence_s_(silence_s), on_lost_(std::move(lost)) {}

BackupLink::~BackupLink() { close(); }

Status BackupLink::start() {
  return reader_.start("hc-ps-answers", [this] { read(); });
}

void BackupLink::close() {
  connection_->shut();
  MutexLock lock(closing_);
  reader_.join();
}

void BackupLink::give_up(const std::string& why) {
  if (lost_.exchange(true)) return;
  {
    MutexLock lock(mutex_);
    why_ = why;
  }
  connection_->shut();
  changed_.notify_all();
  on_lost_();
}

std::string BackupLink::why() const {
  MutexLock lock(mutex_);
  return why_;
}

uint64_t BackupLink::send(const FrameHeader& header, std::span<const uint8_t> payload) {
  MutexLock lock(numbering_);
  const uint64_t number = ++sent_;
  if (is_lost()) return number;
  if (Status status = connection_->send(header, payload, {}, silence_s_); !status.is_ok()) give_up(status.text());
  return number;
}

void BackupLink::ping() {
  FrameHeader header;
  header.verb = Verb::kPing;
  send(header, {});
}

bool BackupLink::wait_for(uint64_t frame, double wait_s) {
  MutexLock lock(mutex_);
  changed_.wait_for(mutex_, std::chrono::duration<double>(wait_s), [&] {
    mutex_.assume_held();
    return done_ >= frame || lost_.load();
  });
  return done_ >= frame;
}

void BackupLink::read() {
  Buffer payload;
  FrameHeader header;
  while (!is_lost()) {
    if (Status status = connection_->receive(&header, &payload, silence_s_); !status.is_ok()) {
      give_up(status.text());
    } else if (header.code != 0) {
      give_up(connection_->peer() +
              " could not follow: " + std::string(payload.bytes().begin(), payload.bytes().end()));
    } else {
      MutexLock lock(mutex_);
      done_ = header.sequence;
      changed_.notify_all();
    }
  }
}

}  // namespace hc
