// A shared library that may be absent. Absence is an ordinary result that carries its reason. A loaded library stays
// loaded, because CUDA and NCCL have threads of their own, which unloading would crash. Thread: any.
#pragma once

#include <memory>
#include <string>

#include "base/status.h"

namespace hc {

class Library {
 public:
  // `name` as dlopen takes it. Unsupported, with the loader's own words, when it cannot be loaded.
  static Result<std::shared_ptr<Library>> open(const std::string& name);
  // The copy that this process has loaded already; null when there is none.
  static std::shared_ptr<Library> loaded(const std::string& name);
  ~Library();
  Library(const Library&) = delete;
  Library& operator=(const Library&) = delete;

  void* symbol(const char* name) const;  // null: it has none
  std::string file() const;              // the path it was loaded from

 private:
  Library(void* handle, std::string name) : handle_(handle), name_(std::move(name)) {}
  void* handle_;
  std::string name_;
};

}  // namespace hc
