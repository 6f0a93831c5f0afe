/* Tables on parameter servers: what a server's program and a worker need. The conventions are those of horoclone.h.
 * Texts that come back are valid until the next call of a function of this header on the same thread. Calls that wait
 * for other processes say so; none waits longer than it was told. */
#pragma once

#include "horoclone.h"

#ifdef __cplusplus
extern "C" {
#endif

/* clang-format off */
typedef enum hc_rule { HC_RULE_SUM, HC_RULE_SGD, HC_RULE_ADAGRAD, HC_RULE_ROW_WISE_ADAGRAD, HC_RULE_ADAM } hc_rule;
typedef enum hc_initial { HC_ZEROS, HC_UNIFORM, HC_NORMAL } hc_initial;
typedef enum hc_role { HC_ROLE_NONE, HC_ROLE_BACKUP, HC_ROLE_PRIMARY, HC_ROLE_UNDECIDED } hc_role;
typedef enum hc_event_kind { HC_ASKED, HC_BACKUP_LOST, HC_PRIMARY_LOST } hc_event_kind;
typedef enum hc_verb { HC_PULL, HC_PUSH, HC_ASSIGN, HC_ROWS } hc_verb;
/* clang-format on */

/* A table: float32 rows of `dim` elements by 64-bit id. */
typedef struct hc_table_spec {
  int32_t version; /* HC_VERSION */
  const char* name;
  uint32_t dim;
  int32_t rule;  /* hc_rule */
  int32_t dense; /* not 0: all rows are pushed in every step; Adam then divides as torch.optim.Adam does */
  float learning_rate, epsilon, beta1, beta2; /* beta1: also SGD's momentum */
  float initial_accumulator;
  int32_t initial; /* hc_initial */
  float spread;    /* uniform: +- spread; normal: standard deviation */
  uint64_t seed;
  int32_t workers;
  int32_t staleness; /* -1 asynchronous; 0: rounds of all workers; s: at most s steps ahead of the slowest */
  int32_t average;   /* rounds: not 0 the mean of the workers' gradients, 0 their sum */
} hc_table_spec;

/* A table in this process, without a server. */
typedef struct hc_table hc_table;
HC_EXPORT hc_status* hc_table_create(const hc_table_spec* spec, size_t memory_bytes, hc_table** out);
HC_EXPORT void hc_table_destroy(hc_table* table);
/* Numbers behind the weights of a row that hc_table_copy gives: the optimizer's state. */
HC_EXPORT uint32_t hc_table_state(const hc_table_spec* spec);
HC_EXPORT uint64_t hc_table_rows(const hc_table* table);
HC_EXPORT hc_status* hc_table_pull(const hc_table* table, const int64_t* ids, size_t n, float* out);
/* One step of the optimizer. Gradients of an id that comes more than once are added up. */
HC_EXPORT hc_status* hc_table_push(hc_table* table, const int64_t* ids, size_t n, const float* gradients);
/* with_state: rows hold the state as well. */
HC_EXPORT hc_status* hc_table_assign(hc_table* table, const int64_t* ids, size_t n, const float* rows,
                                     int32_t with_state);

typedef struct hc_server hc_server;
typedef struct hc_server_options {
  int32_t version;
  int32_t index;
  uint32_t partitions;
  const uint8_t* secret;
  size_t secret_bytes; /* >= 16 */
  const char* job;
  uint64_t generation; /* random, of this life */
  uint64_t memory_bytes;
  double silence_s;
  const char* interfaces; /* comma list; "" = every one that is up */
} hc_server_options;
HC_EXPORT hc_status* hc_server_start(const hc_server_options* options, hc_server** out);
HC_EXPORT void hc_server_stop(hc_server* server); /* waits for its threads; calls fail afterwards */
HC_EXPORT void hc_server_destroy(hc_server* server);
HC_EXPORT const uint8_t* hc_server_endpoint(const hc_server* server, size_t* bytes);
HC_EXPORT hc_status* hc_server_set_role(hc_server* server, uint32_t partition, int32_t role);
HC_EXPORT int32_t hc_server_role(hc_server* server, uint32_t partition);
/* Copies the partition to another server and keeps it up to date from then on. Waits for that server. */
HC_EXPORT hc_status* hc_server_attach(hc_server* server, uint32_t partition, const uint8_t* endpoint, size_t bytes,
                                      int32_t index, uint64_t generation, double timeout_s);
HC_EXPORT hc_status* hc_server_detach(hc_server* server, uint32_t partition);
typedef struct hc_event {
  uint64_t number; /* HC_ASKED: for hc_server_answer */
  int32_t kind;    /* hc_event_kind */
  uint32_t partition;
  const char* text;
} hc_event;
/* 1: there was one within timeout_s. */
HC_EXPORT int32_t hc_server_next_event(hc_server* server, double timeout_s, hc_event* event);
/* code: HC_OK, or what the asking side raises with this text. */
HC_EXPORT void hc_server_answer(hc_server* server, uint64_t number, int32_t code, const char* text);
/* Rows of a table of a partition from row *from on, with state, at most n of them: for a file. *rows 0: none are left.
 */
HC_EXPORT hc_status* hc_server_rows(hc_server* server, uint32_t partition, const char* table, uint64_t* from, size_t n,
                                    int64_t* ids, float* out, size_t* rows, uint64_t* steps);
HC_EXPORT const char* hc_server_describe(hc_server* server); /* JSON */

typedef struct hc_client hc_client;
typedef struct hc_client_options {
  int32_t version;
  int32_t rank;
  uint64_t worker; /* random, of this life, not 0 */
  uint32_t partitions;
  const uint8_t* secret;
  size_t secret_bytes;
  const char* job;
  double silence_s;
} hc_client_options;
HC_EXPORT hc_status* hc_client_create(const hc_client_options* options, hc_client** out);
HC_EXPORT void hc_client_destroy(hc_client* client); /* says goodbye */
HC_EXPORT hc_status* hc_client_connect(hc_client* client, const uint8_t* endpoint, size_t bytes, int32_t index,
                                       uint64_t generation, double timeout_s);
HC_EXPORT int32_t hc_client_is_connected(const hc_client* client, int32_t server);
HC_EXPORT hc_status* hc_client_route(hc_client* client, uint32_t partition, int32_t server);
HC_EXPORT hc_status* hc_client_ask(hc_client* client, int32_t server, const char* question, double timeout_s,
                                   const char** answer);

/* A call knows which of its parts are done: run it until none is left. One at a time per client. */
typedef struct hc_exchange hc_exchange;
/* `in` or `out`: n rows of `floats` numbers, which live as long as the call. flags: 1 = HC_ROWS and HC_ASSIGN leave
 * alone what exists; 2 = the push is no step of this worker. */
HC_EXPORT hc_status* hc_exchange_rows(const hc_client* client, int32_t verb, const char* table, uint32_t flags,
                                      const int64_t* ids, size_t n, uint32_t floats, const float* in, float* out,
                                      hc_exchange** call);
/* Makes the table in every partition, unless it is there, and hc_exchange_register enters this worker in it. */
HC_EXPORT hc_status* hc_exchange_table(const hc_client* client, const hc_table_spec* spec, hc_exchange** call);
HC_EXPORT hc_status* hc_exchange_register(const hc_client* client, const char* table, int32_t rank, hc_exchange** call);
HC_EXPORT void hc_exchange_destroy(hc_exchange* call);
/* [partitions], in the call: this worker's steps so far; hc_exchange_register fills them. */
HC_EXPORT int64_t* hc_exchange_clocks(hc_exchange* call);
typedef struct hc_failure {
  uint32_t partition;
  int32_t server;
  int32_t retry; /* not 0: the server is gone or not the primary; find out where the partition is */
  int32_t code;
  const char* text;
} hc_failure;
/* Waits for the servers. cancelled: asked five times a second while nothing comes, not 0 = give up. *failures: what is
 * not done, valid until the next run; *n 0: everything is. */
HC_EXPORT void hc_exchange_run(hc_client* client, hc_exchange* call, double limit_s, int32_t (*cancelled)(void*),
                               void* context, const hc_failure** failures, size_t* n);

#ifdef __cplusplus
}
#endif
