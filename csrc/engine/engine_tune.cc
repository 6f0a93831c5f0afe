// Autotune: rank 0 measures, every rank uses what it decides, from the same plan on. Thread: the one that drives.
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <functional>

#include "engine/engine.h"

namespace hc {

namespace {

// Names one operation of a step: by its name, or an unnamed one by what it looks like.
uint64_t key_of(const Operation& op) {
  const Signature& s = op.signature();
  uint64_t key = (uint64_t{op.process_set} << 8 | static_cast<uint64_t>(s.op)) * 0x9e3779b97f4a7c15u;
  if (!op.request.name.empty()) return key ^ std::hash<std::string_view>{}(op.request.name);
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

// Gate held, settings agreed on.
void Engine::start_tuner() {
  if (!config_.autotune || mesh_->rank() != 0 || mesh_->size() < 2) return;
  const ProcessSet& world = *sets_[0];
  const bool one_node = world.lane && world.lane->size() == world.size();
  const auto is_fixed = [this](std::string_view setting) {
    return config_.given.contains(setting) &&
           !(setting == "HIERARCHICAL_ALLREDUCE" && config_.hierarchical_allreduce < 0);
  };
  auto ladders = ladders_for({one_node, world.may_be_two_level}, agreed_tuning_, is_fixed);
  Autotuner::Options options;
  options.warmup_samples = config_.autotune_warmup_samples;
  options.steps_per_sample = config_.autotune_steps_per_sample;
  options.search.max_samples = config_.autotune_max_samples;
  options.search.advantage = config_.autotune_noise * 0.05;
  open_tune_log();
  auto tuner = std::make_unique<Autotuner>(options, std::move(ladders), agreed_tuning_);
  if (!tuner->searching()) {
    log_.info("autotune: everything that could be tuned is set by hand");
    return;
  }
  if (!one_node)
    log_.warning(
        "autotune is on: until it has settled, sums between machines may differ in their last bits from run to run "
        "(never between ranks)");
  tuner_ = std::move(tuner);
  adopt(tuner_->settings());
}

void Engine::open_tune_log() {
  if (config_.autotune_log.empty()) return;
  Status begun = write_text(config_.autotune_log, tune_log_head(), true);
  tune_log_open_ = begun.is_ok();
  if (!begun.is_ok()) log_.warning(begun.text(), "; autotune runs without a log");
}

// On hc-notify: a slow disk does not hold up the engine.
void Engine::write_tune_log(std::string text) {
  notifier_.push([this, text = std::move(text)] {
    if (Status written = write_text(config_.autotune_log, text, false); !written.is_ok()) log_.warning(written.text());
  });
}

// `op` has completed, without an error.
void Engine::tune(const Operation& op) {
  const size_t bytes = is_message(op.signature().op) ? 0 : bytes_of(op.signature());
  if (!bytes) return;
  const bool changed = tuner_->completed(key_of(op), bytes, Clock::now());
  std::string lines;
  for (const TuneSample& sample : tuner_->take_samples()) lines += tune_log_line(sample);
  if (!lines.empty() && tune_log_open_) write_tune_log(std::move(lines));
  if (changed) adopt(tuner_->settings());
  if (tuner_->searching()) return;
  log_.info("autotune has settled: ", to_json(tuner_->settings()));
  tuner_.reset();
}

// Rank 0 when it has decided, the others when the plan says so.
void Engine::adopt(const Tuning& tuning) {
  tuning_ = tuning;
  std::lock_guard lock(tuning_mu_);
  tuning_shown_ = tuning;
}

}  // namespace hc
