// What the handlers for every kind of device share: where the runtime is, its process sets, and the places in programs
// that call. Thread: any of XLA's; see Link for its lock.
#pragma once

#include <atomic>
#include <map>
#include <mutex>
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

// Calls of optimizers in arms of branches. How often their branches were come to tells the steps in which this rank has
// left them out; steps of different numbers must not be taken for one. A program that has two calls of one name is not
// watched: XLA runs them in any order.
class Visits {
 public:
  void come(const std::string& key);
  // Before a call: how many visits it ends, 0 for one that is not in a branch.
  int32_t take(const std::string& key);
  // After one: it counts if it has succeeded; else its steps are still to be made up for. Text for a mismatch.
  std::string settle(const std::string& key, int32_t taken, bool succeeded);
  void forget();

 private:
  struct Count {
    int64_t together = 0;  // the visit in which a call succeeded last
    int32_t since = 0;     // visits after it
  };
  std::mutex mu_;  // guards counts_
  std::map<std::string, Count, std::less<>> counts_;
};
Visits& visits();

// A place in a program from which the handler is called. Two places of one program may carry one name (a function with
// a collective that the program calls twice) and XLA runs them in any order: the number tells them apart. XLA makes the
// places of a program in the same order on every rank, because every rank compiles the same program.
struct CallSite {
  int64_t program;
  std::string name;
  int number;  // -1: kVisit
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
  std::string step_key;  // of visits(); empty: not watched
  int32_t visits = 0;    // that this call ends
};
xla::Error* read(xla::CallFrame* frame, xla::TypeId* type, Reading* to);

// What is submitted for a call, with link().mu held; the request points into `from`.
xla::Error* make_request(const xla::Api* api, const Reading& from, hc_request* request);

// kVisit: true, and all is done. On a GPU the result lies where the argument is.
bool is_visit(const Reading& call);
// After a call that was read from a frame: more text for its error.
std::string settle(const Reading& call, hc_code code);

}  // namespace hc::jax
