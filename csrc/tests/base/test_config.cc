// Settings: names, kinds, limits, errors; and the list that the documents are printed from.
#include <doctest/doctest.h>

#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/config.h"
#include "base/setting_rows.h"

namespace {

using namespace hc;
using Settings = std::vector<std::pair<std::string, std::string>>;

Config good(const Settings& settings) {
  auto result = Config::read(settings);
  REQUIRE_MESSAGE(result.is_ok(), result.status().text());
  return result.take();
}

std::string refusal(const std::string& name, const std::string& value) {
  auto result = Config::read(Settings{{name, value}});
  REQUIRE_FALSE(result.is_ok());
  CHECK(result.status().code() == Code::kInvalidArgument);
  return result.status().text();
}

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

}  // namespace

TEST_CASE("without settings every value is the default of the table") {
  const Config c = good({});
  CHECK(c.fusion_bytes == 134217728);
  CHECK(c.batching_delay_ms == 0);
  CHECK(c.cache_capacity == 8192);
  CHECK(c.shared_memory);
  CHECK(c.arena_bytes == size_t{64} << 30);
  CHECK(c.init_timeout_s == 300);
  CHECK(c.stall_check_s == 60);
  CHECK(c.hierarchical_allreduce == -1);
  CHECK(c.log_level == LogLevel::kWarning);
  CHECK(c.simd == "auto");
}

TEST_CASE("HOROCLONE_ wins over HOROVOD_, which is read where the meaning is the same") {
  CHECK(good({{"HOROVOD_FUSION_THRESHOLD", "1000"}}).fusion_bytes == 1000);
  CHECK(good({{"HOROVOD_FUSION_THRESHOLD", "1000"}, {"HOROCLONE_FUSION_THRESHOLD", "2000"}}).fusion_bytes == 2000);
  CHECK(good({{"HOROVOD_GLOO_IFACE", "eth0,eth1"}}).interfaces == "eth0,eth1");
  CHECK(good({{"HOROVOD_CYCLE_TIME", "3.5"}}).batching_delay_ms == 3.5);
  CHECK(good({{"HOROVOD_SEGMENT_BYTES", "64"}}).segment_bytes == 256 * kKiB);  // no such variable
  CHECK(good({{"HOROVOD_NO_SUCH_THING", "x"}}).cache_capacity == 8192);
}

TEST_CASE("an empty value counts as unset, and the last pair of a name wins") {
  CHECK(good({{"HOROCLONE_LOG_LEVEL", ""}, {"HOROVOD_LOG_LEVEL", "error"}}).log_level == LogLevel::kError);
  CHECK(good({{"HOROCLONE_CACHE_CAPACITY", "1"}, {"HOROCLONE_CACHE_CAPACITY", "2"}}).cache_capacity == 2);
}

TEST_CASE("flags, bytes, counts, times and words are read in all their forms") {
  for (const char* on : {"1", "true", "YES", "on", " 1 "}) CHECK(good({{"HOROCLONE_AUTOTUNE", on}}).autotune);
  for (const char* off : {"0", "false", "No", "OFF"})
    CHECK_FALSE(good({{"HOROCLONE_SHARED_MEMORY", off}}).shared_memory);
  CHECK(good({{"HOROCLONE_FUSION_THRESHOLD", "64MiB"}}).fusion_bytes == 64 * kMiB);
  CHECK(good({{"HOROCLONE_FUSION_THRESHOLD", "0.5 gib"}}).fusion_bytes == 512 * kMiB);
  CHECK(good({{"HOROCLONE_FUSION_THRESHOLD", "0"}}).fusion_bytes == 0);
  CHECK(good({{"HOROCLONE_HIERARCHICAL_ALLREDUCE", "-1"}}).hierarchical_allreduce == -1);
  CHECK(good({{"HOROCLONE_LIVENESS_PROBE_S", "0.25"}}).liveness_probe_s == 0.25);
  const Config short_timeout = good({{"HOROVOD_GLOO_TIMEOUT_SECONDS", "2"}});
  CHECK(short_timeout.liveness_error_s == 2);
  CHECK(short_timeout.keepalive_s == 2);
  CHECK(short_timeout.liveness_warn_s == 1);  // the default of 5 would come too late
  CHECK(good({{"HOROVOD_GLOO_TIMEOUT_SECONDS", "120"}}).liveness_warn_s == 5);
  CHECK(good({{"HOROCLONE_YIELD_US", "1e2"}}).yield_us == 100);
  CHECK(good({{"HOROVOD_LOG_LEVEL", "TRACE"}}).log_level == LogLevel::kTrace);
  CHECK(good({{"HOROVOD_CPU_OPERATIONS", "GLOO"}}).cpu_operations == "gloo");
  CHECK(good({{"HOROVOD_TIMELINE", "/tmp/Trace.json"}}).timeline == "/tmp/Trace.json");  // case is kept
}

TEST_CASE("a bad value names the variable that was set, the value and what is accepted") {
  std::string text = refusal("HOROVOD_FUSION_THRESHOLD", "lots");
  CHECK(contains(text, "HOROVOD_FUSION_THRESHOLD"));
  CHECK(contains(text, "'lots'"));
  CHECK(contains(text, "whole bytes from 0"));
  text = refusal("HOROCLONE_LOG_LEVEL", "loud");
  CHECK(contains(text, "HOROCLONE_LOG_LEVEL='loud'"));
  CHECK(contains(text, "trace|debug|info|warning|error|fatal"));
}

TEST_CASE("values out of range, half numbers and trailing text are refused") {
  for (const char* bad : {"-1", "1.5", "12q", "0x10", "nan", "inf", "1e99", "1 2", "KiB"})
    refusal("HOROCLONE_FUSION_THRESHOLD", bad);
  for (const char* bad : {"2", "-1", "maybe", "tru"}) refusal("HOROCLONE_SHARED_MEMORY", bad);
  for (const char* bad : {"-2", "2", "0.5", "x"}) refusal("HOROCLONE_HIERARCHICAL_ALLREDUCE", bad);
  for (const char* bad : {"nan", "-1", "1s", "", " "}) {
    if (*bad) refusal("HOROCLONE_START_TIMEOUT", bad);
  }
  for (const char* bad : {"warn|ing", "trace|debug", "verbose"}) refusal("HOROCLONE_LOG_LEVEL", bad);
  refusal("HOROCLONE_ARENA_BYTES", "1000");
}

TEST_CASE("a warning after the error it warns of is refused") {
  auto result = Config::read(Settings{{"HOROCLONE_LIVENESS_WARN_S", "20"}});
  REQUIRE_FALSE(result.is_ok());
  CHECK(contains(result.status().text(), "HOROCLONE_LIVENESS_ERROR_S"));
}

TEST_CASE("the list of settings has every row of the table once") {
  const std::string json = settings_json();
  std::set<std::string> names;
  for (const SettingRow& row : setting_rows()) names.insert(row.name);
  for (const LauncherSettingRow& row : launcher_setting_rows()) names.insert(row.name);
  CHECK(names.size() == setting_rows().size() + launcher_setting_rows().size());
  for (const std::string& name : names) CHECK(contains(json, "{\"name\": \"HOROCLONE_" + name + "\""));
  CHECK(json.front() == '[');
  CHECK(json.back() == ']');
  CHECK(contains(json, "\"horovod\": \"HOROVOD_GLOO_IFACE\""));
  CHECK(contains(json, "\"horovod\": null"));
}

TEST_CASE("the secret is documented and never kept in a Config") {
  CHECK(contains(settings_json(), "HOROCLONE_SECRET_FILE"));
  good({{"HOROCLONE_SECRET", "0123456789abcdef"}});  // known to the launcher, ignored here
}
