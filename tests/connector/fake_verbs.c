/* An RDMA device that does not exist.
 *
 * The server of InfiniStore refuses to start without a device, also for clients over TCP.  Preloaded, this shows it one
 * that can be opened, and can do nothing.  Build: cc -shared -fPIC -o libfake_verbs.so fake_verbs.c
 */
#include <stdlib.h>
#include <string.h>
#undef _GNU_SOURCE
#include <infiniband/verbs.h>
#undef ibv_query_port
#undef ibv_reg_mr

static struct ibv_device device = {.name = "fake0", .dev_name = "fake0"};
static struct ibv_context context = {.device = &device, .num_comp_vectors = 1};

struct ibv_device **ibv_get_device_list(int *count) {
    struct ibv_device **list = calloc(2, sizeof *list);
    list[0] = &device;
    if (count)
        *count = 1;
    return list;
}
void ibv_free_device_list(struct ibv_device **list) { free(list); }
const char *ibv_get_device_name(struct ibv_device *d) { return d->name; }
struct ibv_context *ibv_open_device(struct ibv_device *d) { return &context; }
int ibv_close_device(struct ibv_context *c) { return 0; }
int ibv_query_port(struct ibv_context *c, uint8_t port, struct _compat_ibv_port_attr *out) {
    struct ibv_port_attr *attr = (struct ibv_port_attr *)out;
    attr->state = IBV_PORT_ACTIVE;
    attr->max_mtu = attr->active_mtu = IBV_MTU_1024;
    attr->gid_tbl_len = 1;
    attr->lid = 1;
    attr->link_layer = IBV_LINK_LAYER_INFINIBAND;
    return 0;
}
int ibv_query_gid(struct ibv_context *c, uint8_t port, int index, union ibv_gid *gid) {
    memset(gid, 0, sizeof *gid);
    gid->raw[15] = 1;
    return 0;
}
struct ibv_pd *ibv_alloc_pd(struct ibv_context *c) {
    struct ibv_pd *pd = calloc(1, sizeof *pd);
    pd->context = c;
    return pd;
}
int ibv_dealloc_pd(struct ibv_pd *pd) { return 0; }
struct ibv_mr *ibv_reg_mr(struct ibv_pd *pd, void *address, size_t length, int access) {
    struct ibv_mr *mr = calloc(1, sizeof *mr);
    mr->addr = address;
    mr->length = length;
    mr->lkey = mr->rkey = 1;
    return mr;
}
int ibv_dereg_mr(struct ibv_mr *mr) {
    free(mr);
    return 0;
}
