// What the handlers for every kind of device share: where the runtime is, its process sets, and the places in programs
// that call. Thread: any of XLA's; see Link for its lock.
#pragma once

#include <atomic>
#include <map>
#include <shared_mutex>
#include <string>

#include "frameworks/jax_call.h"

namespace hc::jax {

// The runtime and the process sets of its present life. Shared by submits, exclusive for attach: when attach(nullptr)
// has returned, no submit is on its way into the old runtime.
struct Link {
  std::shared_mutex mu;  // guards the rest
  hc_runtime* runtime = nullptr;
  std::map<std::string, int32_t, std::less<>> process_sets;  // "0,2" -> id
  // Of this process's life, read without the lock: call sites that were made, calls that came here, calls that ended.
  std::atomic<int64_t> sites{0}, begun{0}, ended{0};
};
Link& link();

// A place in a program from which the handler is called. Two places of one program may carry one name (a function with
// a collective that the program calls twice) and XLA runs them in any order: the number tells them apart. XLA makes the
// places of a program in the same order on every rank, because every rank compiles the same program.
struct CallSite {
  int64_t program;
  std::string name;
  int number;
};
CallSite* make_call_site(const Attributes& attributes);
void destroy_call_site(void* site);

// Stage "instantiate" of the handler whose places have the type `type`.
xla::Error* instantiate(xla::CallFrame* frame, xla::TypeId* type);

// Answers XLA's question at registration: for which version of its interface the handler was made.
bool is_metadata_query(xla::CallFrame* frame);

xla::Error* refuse(const xla::Api* api, hc_code code, const std::string& text);

// Reads a frame of stage "execute": what is called, on which tensors, and under which name.
struct Reading {
  Attributes attributes;
  Tensors tensors;
  std::string name;
};
xla::Error* read(xla::CallFrame* frame, xla::TypeId* type, Reading* to);

// What is submitted for a call, with link().mu held; the request points into `from`.
xla::Error* make_request(const xla::Api* api, const Reading& from, hc_request* request);

}  // namespace hc::jax
