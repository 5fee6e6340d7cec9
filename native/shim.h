/*
 * C around UCX that Rust cannot express: macros, inline functions, variable
 * argument lists and FILE streams. Nothing here decides anything.
 *
 * kvferry is built once and runs with any UCX from 1.13 on, whatever headers it
 * was built with. Hence three rules. UCX is not linked but loaded: its functions
 * are called through pointers. Only functions of 1.13 are needed. What later versions added to a structure is declared here again, under our
 * name, and checked against UCX's declaration where the headers have it
 * (shim.c).
 */
#ifndef KVFERRY_SHIM_H
#define KVFERRY_SHIM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <ucp/api/ucp.h>
#include <ucs/config/types.h>

/* The API generation that kvferry is written for. */
#define KVF_UCX_API_MAJOR 1
#define KVF_UCX_API_MINOR 13

/* ---- The loaded UCX ------------------------------------------------------ */

/* The address of `name` in a library, or NULL. */
typedef void *(*kvf_find_fn)(void *library, const char *name);

/* Takes the functions that the ones below call out of `library`. To be called once,
 * before any of them; NULL, or the name of a function that is missing. */
const char *kvf_bind(kvf_find_fn find, void *library);

/* ---- Status pointers ---------------------------------------------------- */

/* What an `nbx` call returned: NULL has completed, a pointer is a request in
 * progress, and anything else is an error. */
bool kvf_ptr_is_err(const void *ptr);
bool kvf_ptr_is_ptr(const void *ptr);
/* UCS_OK for NULL, UCS_INPROGRESS for a request, else the error. */
ucs_status_t kvf_ptr_status(const void *ptr);

/* ---- Data types --------------------------------------------------------- */

/* The data type of `elem_size` contiguous bytes. */
ucp_datatype_t kvf_dt_contig(size_t elem_size);

/* ---- Context ------------------------------------------------------------ */

/* ucp_init, asking for API 1.13 whatever the headers say. */
ucs_status_t kvf_init(const ucp_params_t *params, const ucp_config_t *config,
                      ucp_context_h *context);

/* Takes out UCX's handlers for SIGSEGV, SIGBUS, SIGFPE and the like, which 1.13
 * installs when the library is loaded. */
void kvf_disable_signals(void);

/* ---- Text --------------------------------------------------------------- */

/* What ucp_ep_print_info, ucp_context_print_info and ucp_config_print write, as a
 * string for free(3). NULL when memory ran out. */
char *kvf_ep_text(ucp_ep_h ep);
char *kvf_context_text(ucp_context_h context);
char *kvf_config_text(const ucp_config_t *config);

/* ---- Log ---------------------------------------------------------------- */

/* Receives one log message. `level` is a ucs_log_level_t, `file` and `message`
 * live until the function returns, and are never NULL. It may be called from any
 * thread, UCX's own included, with UCX's locks held: it must not call UCX. */
typedef void (*kvf_log_fn)(int level, const char *file, unsigned line, const char *message);

/* Sends UCX's log messages to `fn` and nowhere else; NULL gives them back to
 * UCX, which prints to standard output. Messages of another thread that are
 * under way may still reach the previous function. */
void kvf_log_set(kvf_log_fn fn);

/* ---- UCX 1.14: which transports an endpoint uses ------------------------ */

/* ucp_ep_attr_t::field_mask, UCP_EP_ATTR_FIELD_TRANSPORTS. */
#define KVF_EP_ATTR_FIELD_TRANSPORTS 8

/* ucp_transport_entry_t */
typedef struct kvf_transport_entry {
    const char *transport_name;
    const char *device_name;
} kvf_transport_entry_t;

/* ucp_transports_t */
typedef struct kvf_transports {
    kvf_transport_entry_t *entries;
    unsigned num_entries;
    size_t entry_size;
} kvf_transports_t;

/* ucp_ep_attr_t up to `transports`; UCX writes only the fields asked for. */
typedef struct kvf_ep_attr {
    uint64_t field_mask;
    char name[32];
    struct sockaddr_storage local_sockaddr;
    struct sockaddr_storage remote_sockaddr;
    kvf_transports_t transports;
} kvf_ep_attr_t;

#endif
