#include "base/library.h"

#include <dlfcn.h>
#include <link.h>

#include "base/mutex.h"

namespace hc {

namespace {
// The loader has a lock of its own. ThreadSanitizer does not see that one, and takes what the loader wrote for a race.
Mutex loader_mu;
}  // namespace

Result<std::shared_ptr<Library>> Library::open(const std::string& name) {
  MutexLock lock(loader_mu);
  (void)::dlerror();
  if (void* handle = ::dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE))
    return std::shared_ptr<Library>(new Library(handle, name));
  const char* why = ::dlerror();
  return error(Code::kUnsupported, why ? why : name + " cannot be loaded");
}

std::shared_ptr<Library> Library::loaded(const std::string& name) {
  MutexLock lock(loader_mu);
  void* handle = ::dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);
  return handle ? std::shared_ptr<Library>(new Library(handle, name)) : nullptr;
}

Library::~Library() { ::dlclose(handle_); }

void* Library::symbol(const char* name) const { return ::dlsym(handle_, name); }

std::string Library::file() const {
  MutexLock lock(loader_mu);
  link_map* map = nullptr;
  if (::dlinfo(handle_, RTLD_DI_LINKMAP, &map) == 0 && map && map->l_name && *map->l_name) return map->l_name;
  return name_;
}

}  // namespace hc
