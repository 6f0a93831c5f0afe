#include <cerrno>
#include <cstdio>
#include <cstring>

#include "engine/tune/tuner.h"

#include "base/hash.h"

namespace hc {

namespace {

// Names one operation of a step: by its name, or an unnamed one by what it looks like.
uint64_t key_of(const Operation& op) {
  const Signature& s = op.signature();
  uint64_t key = (uint64_t{op.process_set} << 8 | static_cast<uint64_t>(s.op)) * 0x9e3779b97f4a7c15u;
  if (!op.request.name.empty()) return key ^ hash_of_text(op.request.name);
  for (const TensorMeta& t : s.tensors) {
    key = (key ^ static_cast<uint64_t>(t.dtype)) * 0x100000001b3u;
    for (int64_t d : t.shape) key = (key ^ static_cast<uint64_t>(d)) * 0x100000001b3u;
  }
  return key;
}

// Adds to the file; truncates it first when `anew`.
Status write_text(const std::string& path, const std::string& text, bool anew) {
  std::FILE* file = std::fopen(path.c_str(), anew ? "we" : "ae");
  bool good = file && std::fwrite(text.data(), 1, text.size(), file) == text.size();
  const int why = errno;
  if (file) good = std::fclose(file) == 0 && good;
  if (good) return Status::ok();
  return error(Code::kInvalidArgument, "HOROVOD_AUTOTUNE_LOG: '", path, "' cannot be written: ", std::strerror(why));
}

}  // namespace

void Tuner::start(const TuneLayout& layout) {
  if (!context_.config.autotune || context_.mesh->rank() != 0 || context_.mesh->size() < 2) return;
  const auto is_fixed = [this](std::string_view setting) {
    return context_.config.given.contains(setting) &&
           !(setting == "HIERARCHICAL_ALLREDUCE" && context_.config.hierarchical_allreduce < 0);
  };
  auto ladders = ladders_for(layout, agreed_, is_fixed);
  Autotuner::Options options;
  options.warmup_samples = context_.config.autotune_warmup_samples;
  options.steps_per_sample = context_.config.autotune_steps_per_sample;
  options.search.max_samples = context_.config.autotune_max_samples;
  options.search.advantage = kAdvantageOfNoise * context_.config.autotune_noise;
  open_log();
  auto tuner = std::make_unique<Autotuner>(options, std::move(ladders), agreed_);
  if (!tuner->searching()) {
    context_.log.info("autotune: everything that could be tuned is set by hand");
    return;
  }
  if (!layout.one_node)
    context_.log.warning(
        "autotune is on: until it has settled, sums between machines may differ in their last bits from run to run "
        "(never between ranks)");
  search_ = std::move(tuner);
  adopt(search_->settings());
}

void Tuner::open_log() {
  if (context_.config.autotune_log.empty()) return;
  Status begun = write_text(context_.config.autotune_log, tune_log_head(), true);
  log_is_open_ = begun.is_ok();
  if (!begun.is_ok()) context_.log.warning(begun.text(), "; autotune runs without a log");
}

// On hc-notify: a slow disk does not hold up the engine.
void Tuner::write_log(std::string text) {
  notifier_.push([this, text = std::move(text)] {
    if (Status written = write_text(context_.config.autotune_log, text, false); !written.is_ok())
      context_.log.warning(written.text());
  });
}

void Tuner::completed(const Operation& op) {
  const size_t bytes = is_message(op.signature().op) ? 0 : bytes_of(op.signature());
  if (!bytes) return;
  const bool changed = search_->completed(key_of(op), bytes, Clock::now());
  std::string lines;
  for (const TuneSample& sample : search_->take_samples()) lines += tune_log_line(sample);
  if (!lines.empty() && log_is_open_) write_log(std::move(lines));
  if (changed) adopt(search_->settings());
  if (search_->searching()) return;
  context_.log.info("autotune has settled: ", to_json(search_->settings()));
  search_.reset();
}

// Rank 0 when it has decided, the others when the plan says so.
void Tuner::adopt(const Tuning& tuning) {
  newest_ = tuning;
  ++revision_;
  MutexLock lock(mu_);
  shown_ = tuning;
}

std::string Tuner::json() const {
  MutexLock lock(mu_);
  return to_json(shown_);
}

}  // namespace hc
