#include "device/kernel_image.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <map>

#include "base/mutex.h"
#include "base/sha256.h"

// Made by the build (CMakeLists.txt).
extern "C" const char hc_kernel_source[];
extern "C" const char hc_kernel_header[];
extern "C" const char hc_reductions_header[];
#ifdef HC_KERNEL_FATBINARY
extern "C" const char hc_kernel_fatbinary[];
extern "C" const char hc_kernel_fatbinary_end[];
#endif

namespace hc {

namespace {

constexpr size_t kDigestText = 64;
constexpr size_t kLargestImage = 64u << 20;

// What this process has compiled or read before; the same for every engine of it, as it changes no result.
Mutex made_mu;
std::map<std::string, KernelImage>& made() HC_REQUIRES(made_mu) {
  static std::map<std::string, KernelImage> images;
  return images;
}

std::string hex(const Digest& digest) {
  constexpr char digits[] = "0123456789abcdef";
  std::string text;
  for (const uint8_t byte : digest) {
    text += digits[byte >> 4];
    text += digits[byte & 15];
  }
  return text;
}

std::string cache_folder(const std::string& setting) {
  if (setting == "off") return "";
  if (!setting.empty()) return setting;
  const char* base = std::getenv("XDG_CACHE_HOME");
  if (base && *base == '/') return std::string(base) + "/horoclone";
  const char* home = std::getenv("HOME");
  return home && *home == '/' ? std::string(home) + "/.cache/horoclone" : "";
}

// Ours alone to write: what lies there is loaded into the GPU.
bool is_private(const struct stat& found) { return found.st_uid == ::geteuid() && (found.st_mode & 022) == 0; }

// The file is the digest of the code, then the code. Empty: not there, not ours, or damaged.
std::string read_cached(const std::string& path) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
  if (fd < 0) return "";
  struct stat found{};
  std::string text;
  if (::fstat(fd, &found) == 0 && S_ISREG(found.st_mode) && is_private(found) &&
      static_cast<size_t>(found.st_size) > kDigestText && static_cast<size_t>(found.st_size) < kLargestImage) {
    text.resize(static_cast<size_t>(found.st_size));
    size_t at = 0;
    for (ssize_t got; at < text.size() && (got = ::read(fd, text.data() + at, text.size() - at)) > 0;)
      at += static_cast<size_t>(got);
    text.resize(at);
  }
  ::close(fd);
  if (text.size() <= kDigestText) return "";
  const std::string code = text.substr(kDigestText);
  return text.compare(0, kDigestText, hex(sha256(bytes_of(code)))) == 0 ? code : "";
}

// Best effort: without a cache it is compiled again next time. A rename, so that ranks that do it at once do no harm.
void write_cached(const std::string& folder, const std::string& path, const std::string& code) {
  for (size_t at = folder.find('/', 1); at != std::string::npos; at = folder.find('/', at + 1))
    (void)::mkdir(folder.substr(0, at).c_str(), 0700);
  (void)::mkdir(folder.c_str(), 0700);
  struct stat found{};
  if (::stat(folder.c_str(), &found) != 0 || !is_private(found)) return;
  const std::string text = hex(sha256(bytes_of(code))) + code, unfinished = text_of(path, ".", ::getpid());
  const int fd = ::open(unfinished.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600);
  if (fd < 0) return;
  size_t at = 0;
  for (ssize_t put; at < text.size() && (put = ::write(fd, text.data() + at, text.size() - at)) > 0;)
    at += static_cast<size_t>(put);
  const bool whole = ::close(fd) == 0 && at == text.size();
  if (!whole || ::rename(unfinished.c_str(), path.c_str()) != 0) (void)::unlink(unfinished.c_str());
}

}  // namespace

NvrtcApi::Source kernel_source() {
  return {
      hc_kernel_source, {hc_kernel_header, hc_reductions_header}, {"device/kernel_arguments.h", "base/reductions.h"}};
}

KernelImage built_in_kernels() {
#ifdef HC_KERNEL_FATBINARY
  return {std::string(hc_kernel_fatbinary, hc_kernel_fatbinary_end), "built in"};
#else
  return {};
#endif
}

Result<KernelImage> compiled_kernels(const KernelOptions& options, const std::string& architecture,
                                     const GpuPlatform& platform) {
  auto nvrtc = NvrtcApi::load(options.nvrtc_library, options.nvrtc_folders, platform);
  HC_TRY(nvrtc.status());
  const NvrtcApi& api = *nvrtc.value();
  const std::string version = text_of(api.major, ".", api.minor);
  Sha256 hash;
  hash.update(bytes_of(hc_kernel_header));
  hash.update(bytes_of(hc_reductions_header));
  hash.update(bytes_of(hc_kernel_source));
  // The file as well: another build of one version may differ, and the tests' fake does.
  hash.update(bytes_of(api.file));
  const std::string key =
      text_of("kernels-", architecture, platform.is_hip ? "-hiprtc-" : "-nvrtc-", version, "-", hex(hash.finish()));
  MutexLock lock(made_mu);  // whoever comes second waits for the first's result
  if (const auto at = made().find(key); at != made().end()) return at->second;
  const std::string folder = cache_folder(options.cache), path = folder + "/" + key;
  KernelImage image{folder.empty() ? "" : read_cached(path), text_of(api.name(), " ", version, " for ", architecture)};
  if (image.code.empty()) {
    auto code = api.compile(kernel_source(), architecture);
    HC_TRY(code.status());
    image.code = code.take();
    if (!folder.empty()) write_cached(folder, path, image.code);
  } else {
    image.origin += ", from " + folder;
  }
  return made()[key] = image;
}

}  // namespace hc
