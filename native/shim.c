/* See shim.h. */
#define _GNU_SOURCE

#include "ucx.h"

#include <errno.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>

#include <ucs/debug/log_def.h>

/* ---- Layouts of later versions ------------------------------------------ */

#define SAME_OFFSET(ours, theirs, field) \
    _Static_assert(offsetof(ours, field) == offsetof(theirs, field), \
                   "offset of " #field " differs from UCX's")

SAME_OFFSET(kvf_ep_attr_t, ucp_ep_attr_t, field_mask);
SAME_OFFSET(kvf_ep_attr_t, ucp_ep_attr_t, name);
SAME_OFFSET(kvf_ep_attr_t, ucp_ep_attr_t, local_sockaddr);
SAME_OFFSET(kvf_ep_attr_t, ucp_ep_attr_t, remote_sockaddr);

#if UCP_API_VERSION >= UCP_VERSION(1, 14)
_Static_assert(KVF_EP_ATTR_FIELD_TRANSPORTS == UCP_EP_ATTR_FIELD_TRANSPORTS,
               "bit of the transports field differs from UCX's");
SAME_OFFSET(kvf_transport_entry_t, ucp_transport_entry_t, transport_name);
SAME_OFFSET(kvf_transport_entry_t, ucp_transport_entry_t, device_name);
SAME_OFFSET(kvf_transports_t, ucp_transports_t, entries);
SAME_OFFSET(kvf_transports_t, ucp_transports_t, num_entries);
SAME_OFFSET(kvf_transports_t, ucp_transports_t, entry_size);
_Static_assert(sizeof(kvf_transports_t) == sizeof(ucp_transports_t),
               "size of the transports structure differs from UCX's");
SAME_OFFSET(kvf_ep_attr_t, ucp_ep_attr_t, transports);
#endif

/* ---- The loaded UCX ------------------------------------------------------ */

/* Exported by libucs in every version, declared in no installed header. */
typedef void (*disable_signals_fn)(void);

static __typeof__(&ucp_init_version) init_version;
static __typeof__(&ucp_ep_print_info) ep_print_info;
static __typeof__(&ucp_context_print_info) context_print_info;
static __typeof__(&ucp_config_print) config_print;
static __typeof__(&ucs_log_push_handler) log_push_handler;
static disable_signals_fn debug_disable_signals;

#define BIND(pointer, name) \
    do { \
        pointer = (__typeof__(pointer))find(library, name); \
        if (pointer == NULL) { \
            return name; \
        } \
    } while (0)

const char *kvf_bind(kvf_find_fn find, void *library)
{
    BIND(init_version, "ucp_init_version");
    BIND(ep_print_info, "ucp_ep_print_info");
    BIND(context_print_info, "ucp_context_print_info");
    BIND(config_print, "ucp_config_print");
    BIND(log_push_handler, "ucs_log_push_handler");
    /* A UCX without it still loads. */
    debug_disable_signals = (disable_signals_fn)find(library, "ucs_debug_disable_signals");
    return NULL;
}

/* ---- Status pointers, data types, context ------------------------------- */

bool kvf_ptr_is_err(const void *ptr)
{
    return UCS_PTR_IS_ERR(ptr);
}

bool kvf_ptr_is_ptr(const void *ptr)
{
    return UCS_PTR_IS_PTR(ptr);
}

ucs_status_t kvf_ptr_status(const void *ptr)
{
    return UCS_PTR_STATUS(ptr);
}

ucp_datatype_t kvf_dt_contig(size_t elem_size)
{
    return ucp_dt_make_contig(elem_size);
}

ucs_status_t kvf_init(const ucp_params_t *params, const ucp_config_t *config,
                      ucp_context_h *context)
{
    return init_version(KVF_UCX_API_MAJOR, KVF_UCX_API_MINOR, params, config, context);
}

void kvf_disable_signals(void)
{
    if (debug_disable_signals != NULL) {
        debug_disable_signals();
    }
}

/* ---- Text --------------------------------------------------------------- */

char *kvf_ep_text(ucp_ep_h ep)
{
    char *text = NULL;
    size_t length = 0;
    FILE *stream = open_memstream(&text, &length);

    if (stream == NULL) {
        return NULL;
    }
    ep_print_info(ep, stream);
    if (fclose(stream) != 0) {
        free(text);
        return NULL;
    }
    return text;
}

char *kvf_context_text(ucp_context_h context)
{
    char *text = NULL;
    size_t length = 0;
    FILE *stream = open_memstream(&text, &length);

    if (stream == NULL) {
        return NULL;
    }
    context_print_info(context, stream);
    if (fclose(stream) != 0) {
        free(text);
        return NULL;
    }
    return text;
}

char *kvf_config_text(const ucp_config_t *config)
{
    char *text = NULL;
    size_t length = 0;
    FILE *stream = open_memstream(&text, &length);

    if (stream == NULL) {
        return NULL;
    }
    config_print(config, stream, NULL, UCS_CONFIG_PRINT_CONFIG);
    if (fclose(stream) != 0) {
        free(text);
        return NULL;
    }
    return text;
}

/* ---- Log ---------------------------------------------------------------- */

static _Atomic(kvf_log_fn) log_fn;
static atomic_flag log_handler_pushed = ATOMIC_FLAG_INIT;

static ucs_log_func_rc_t log_handler(const char *file, unsigned line, const char *function,
                                     ucs_log_level_t level,
                                     const ucs_log_component_config_t *component,
                                     const char *format, va_list args)
{
    kvf_log_fn fn = atomic_load(&log_fn);
    /* The caller may look at errno after it has logged it. */
    int saved_errno = errno;
    char stack[1024];
    char *message = stack;
    va_list again;
    int length;

    (void)function;
    (void)component;
    if (fn == NULL) {
        return UCS_LOG_FUNC_RC_CONTINUE;
    }

    va_copy(again, args);
    length = vsnprintf(stack, sizeof(stack), format, args);
    if (length >= (int)sizeof(stack)) {
        /* Without memory the first part has to do. */
        message = malloc((size_t)length + 1);
        if (message == NULL) {
            message = stack;
        } else {
            errno = saved_errno; /* for %m */
            vsnprintf(message, (size_t)length + 1, format, again);
        }
    } else if (length < 0) {
        snprintf(stack, sizeof(stack), "%s", format);
    }
    va_end(again);

    fn((int)level, file != NULL ? file : "", line, message);

    if (message != stack) {
        free(message);
    }
    errno = saved_errno;
    return UCS_LOG_FUNC_RC_STOP;
}

void kvf_log_set(kvf_log_fn fn)
{
    atomic_store(&log_fn, fn);
    /* The handler stays where it is: UCX has few places for handlers, and pops
     * whichever is on top. */
    if (fn != NULL && !atomic_flag_test_and_set(&log_handler_pushed)) {
        log_push_handler(log_handler);
    }
}
