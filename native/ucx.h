/* bindgen's input: what kvferry uses of UCX, and the C around it. */
#ifndef KVFERRY_UCX_H
#define KVFERRY_UCX_H

#include <ucp/api/ucp.h>
#include <ucs/config/types.h>
#include <ucs/memory/memory_type.h>
#include <ucs/type/status.h>

#include "shim.h"

#endif
