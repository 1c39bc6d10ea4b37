/* A server that answers by a known schedule and logs when it did what: the truth that load generators are held against.
 *
 * One thread, epoll, HTTP/1.1 on 127.0.0.1. Speaks enough of the OpenAI API for load generators: POST /v1/completions and
 * /v1/chat/completions (streamed or whole), GET /v1/models, /health, /metrics. Prints the port it listens on.
 *
 * The first token is due `--ttft-us` after the whole request was read, each next chunk `--itl-us` after the one before
 * was *due*: a chunk that goes out late delays no other. Times are CLOCK_MONOTONIC, which is Python's perf_counter.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { MAX_FDS = 65536, MAX_FIRES = 32, FRAME = 2048 };
static const double SPIN_S = 0.0001;
enum mode { PLAIN, ERROR_FRAME, ROLE_FIRST, EMPTY, PACKED, CUT, BUSY, NUM_MODES };
static const char *const MODES[NUM_MODES] = {"plain", "error", "role", "empty", "packed", "cut", "busy"};

/* The log: 16 bytes an entry, little-endian. `request` is a socket's number for OPENED and CLOSED. */
enum event { RECEIVED, SENT_NO_TOKEN, SENT_TOKENS, ENDED, ENDED_BADLY, CLIENT_LEFT, OPENED, CLOSED };
struct entry { uint32_t request; uint16_t event, tokens; double at_s; };

struct connection {
    char *in;                       /* request bytes read so far */
    size_t in_used, in_size;
    char *out;                      /* what the socket did not take; NULL: nothing */
    size_t out_used;
    uint32_t request;
    int is_open, is_busy, is_chat, is_stream, wants_usage, wants_running_usage, close_after;
    enum mode mode;
    int prompt_tokens, tokens_asked, tokens_sent, chunks_sent;
    double due_s;
};

static struct connection connections[MAX_FDS];
static struct { double due_s; int fd; uint32_t request; } heap[MAX_FDS];
static int heap_size, epoll_fd, odd_every = 1, fixed_tokens, per_chunk = 4, odd_after = 5;
static double ttft_s = 0.2, itl_s = 0.05;
static enum mode odd = PLAIN;
static const char *model = "stub";
static FILE *log_file;
static uint32_t num_requests, num_running;
static unsigned long long prompt_total, generated_total;
static volatile sig_atomic_t stopped;

static double now_s(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void note(uint32_t request, enum event event, int tokens, double at_s) {
    struct entry entry = {request, (uint16_t)event, (uint16_t)tokens, at_s};
    if (log_file) fwrite(&entry, sizeof entry, 1, log_file);
}

/* --- when: a heap of streams by their next chunk's time --------------------------------------------------------- */

static void push(double due_s, int fd, uint32_t request) {
    int i = heap_size++;
    for (int up; i && heap[up = (i - 1) / 2].due_s > due_s; i = up) heap[i] = heap[up];
    heap[i].due_s = due_s, heap[i].fd = fd, heap[i].request = request;
}

static void pop(void) {
    int i = 0, down;
    double due_s = heap[--heap_size].due_s;
    while ((down = 2 * i + 1) < heap_size) {
        if (down + 1 < heap_size && heap[down + 1].due_s < heap[down].due_s) down++;
        if (heap[down].due_s >= due_s) break;
        heap[i] = heap[down], i = down;
    }
    heap[i] = heap[heap_size];
}

/* --- sockets ---------------------------------------------------------------------------------------------------- */

static void drop(int fd) {
    struct connection *c = &connections[fd];
    if (!c->is_open) return;
    if (c->is_busy) note(c->request, CLIENT_LEFT, 0, now_s()), num_running--;
    note((uint32_t)fd, CLOSED, 0, now_s());
    free(c->in), free(c->out);
    memset(c, 0, sizeof *c);
    close(fd);
}

static void watch(int fd, int also_writable) {
    struct epoll_event e = {.events = EPOLLIN | (also_writable ? EPOLLOUT : 0), .data.fd = fd};
    epoll_ctl(epoll_fd, EPOLL_CTL_MOD, fd, &e);
}

static void put(int fd, const char *bytes, size_t size) {
    struct connection *c = &connections[fd];
    ssize_t sent = c->out ? 0 : send(fd, bytes, size, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent < 0) sent = 0; /* a broken socket is dropped when it is read */
    if ((size_t)sent == size) return;
    c->out = realloc(c->out, c->out_used + size - (size_t)sent);
    memcpy(c->out + c->out_used, bytes + sent, size - (size_t)sent);
    c->out_used += size - (size_t)sent;
    watch(fd, 1);
}

static void put_rest(int fd) {
    struct connection *c = &connections[fd];
    ssize_t sent = send(fd, c->out, c->out_used, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent <= 0) return;
    memmove(c->out, c->out + sent, c->out_used -= (size_t)sent);
    if (c->out_used) return;
    free(c->out), c->out = NULL;
    watch(fd, 0);
}

static void put_plain(int fd, const char *status, const char *header, const char *type, const char *body) {
    char text[FRAME * 4];
    int n = snprintf(text, sizeof text, "HTTP/1.1 %s\r\n%sContent-Type: %s\r\nContent-Length: %zu\r\n\r\n%s", status, header,
                     type, strlen(body), body);
    put(fd, text, (size_t)n);
}

/* --- frames ----------------------------------------------------------------------------------------------------- */

static int add_chunk(char *to, const char *data) {
    return sprintf(to, "%zx\r\ndata: %s\n\n\r\n", strlen(data) + 8, data);
}

static int add_frame(const struct connection *c, char *to, int tokens, const char *finish, int only_usage) {
    char data[FRAME], text[256] = "", usage[160] = "", choices[640] = "";
    for (int i = 0; i < tokens; i++) strcat(text, " hi");
    if (only_usage || c->wants_running_usage)
        sprintf(usage, ",\"usage\":{\"prompt_tokens\":%d,\"completion_tokens\":%d,\"total_tokens\":%d}", c->prompt_tokens,
                c->tokens_sent, c->prompt_tokens + c->tokens_sent);
    if (!only_usage)
        sprintf(choices, c->is_chat ? "{\"index\":0,\"delta\":{\"content\":\"%s\"},\"logprobs\":null,\"finish_reason\":%s}"
                                    : "{\"index\":0,\"text\":\"%s\",\"logprobs\":null,\"finish_reason\":%s}", text, finish);
    snprintf(data, sizeof data, "{\"id\":\"%s-%u\",\"object\":\"%s\",\"created\":1,\"model\":\"%s\",\"choices\":[%s]%s}",
             c->is_chat ? "chatcmpl" : "cmpl", c->request, c->is_chat ? "chat.completion.chunk" : "text_completion", model,
             choices, usage);
    return add_chunk(to, data);
}

static int add_role(const struct connection *c, char *to) {
    char data[512];
    if (!c->is_chat) return add_frame(c, to, 0, "null", 0);
    snprintf(data, sizeof data, "{\"id\":\"chatcmpl-%u\",\"object\":\"chat.completion.chunk\",\"created\":1,\"model\":\"%s\","
             "\"choices\":[{\"index\":0,\"delta\":{\"role\":\"assistant\",\"content\":\"\"},\"finish_reason\":null}]}",
             c->request, model);
    return add_chunk(to, data);
}

static void end(int fd, enum event how) {
    struct connection *c = &connections[fd];
    note(c->request, how, 0, now_s());
    c->is_busy = 0, num_running--;
    if (c->close_after || c->mode == CUT) drop(fd);
}

static void put_whole(int fd) {
    struct connection *c = &connections[fd];
    char body[FRAME * 3], *text = calloc(1, 3 * (size_t)c->tokens_asked + 1);
    for (int i = 0; i < c->tokens_asked && i < 1024; i++) memcpy(text + 3 * i, " hi", 3);
    snprintf(body, sizeof body, c->is_chat
             ? "{\"id\":\"c\",\"object\":\"chat.completion\",\"created\":1,\"model\":\"%s\",\"choices\":[{\"index\":0,\"message\":"
               "{\"role\":\"assistant\",\"content\":\"%s\"},\"finish_reason\":\"length\"}],\"usage\":{\"prompt_tokens\":%d,"
               "\"completion_tokens\":%d,\"total_tokens\":%d}}"
             : "{\"id\":\"c\",\"object\":\"text_completion\",\"created\":1,\"model\":\"%s\",\"choices\":[{\"index\":0,\"text\":"
               "\"%s\",\"finish_reason\":\"length\"}],\"usage\":{\"prompt_tokens\":%d,\"completion_tokens\":%d,"
               "\"total_tokens\":%d}}",
             model, text, c->prompt_tokens, c->tokens_asked, c->prompt_tokens + c->tokens_asked);
    free(text);
    put_plain(fd, "200 OK", "", "application/json", body);
    end(fd, ENDED);
}

/* One chunk of one stream, and what follows the last one, in one send. */
static void fire(int fd) {
    struct connection *c = &connections[fd];
    char bytes[FRAME * 4];
    int n = 0, is_last;
    if (!c->is_stream) { put_whole(fd); return; }
    if (c->mode == CUT && c->chunks_sent == odd_after) { end(fd, ENDED_BADLY); return; }
    if (c->mode == ERROR_FRAME && c->chunks_sent == odd_after) {
        n = add_chunk(bytes, "{\"error\":{\"message\":\"engine died\",\"type\":\"internal_error\",\"code\":500}}");
        n += add_chunk(bytes + n, "[DONE]");
        n += sprintf(bytes + n, "0\r\n\r\n");
        put(fd, bytes, (size_t)n);
        end(fd, ENDED_BADLY);
        return;
    }
    int tokens = c->mode == EMPTY ? 0 : c->mode == PACKED ? per_chunk : 1;
    if (tokens > c->tokens_asked - c->tokens_sent) tokens = c->tokens_asked - c->tokens_sent;
    c->tokens_sent += tokens, generated_total += (unsigned)tokens;
    is_last = c->mode == EMPTY || c->tokens_sent == c->tokens_asked;
    if (!c->chunks_sent++ && c->is_chat && c->mode != ROLE_FIRST) n += add_role(c, bytes);
    n += add_frame(c, bytes + n, tokens, is_last ? c->mode == EMPTY ? "\"stop\"" : "\"length\"" : "null", 0);
    if (is_last) {
        if (c->wants_usage) n += add_frame(c, bytes + n, 0, "null", 1);
        n += add_chunk(bytes + n, "[DONE]");
        n += sprintf(bytes + n, "0\r\n\r\n");
    }
    note(c->request, tokens ? SENT_TOKENS : SENT_NO_TOKEN, tokens, now_s());
    put(fd, bytes, (size_t)n);
    if (is_last) { end(fd, ENDED); return; }
    c->due_s += itl_s;
    push(c->due_s, fd, c->request);
}

/* --- requests --------------------------------------------------------------------------------------------------- */

static int number_after(const char *body, const char *key) {
    const char *at = strstr(body, key);
    return at ? atoi(at + strlen(key) + strspn(at + strlen(key), " :")) : 0;
}

static int is_true(const char *body, const char *key) {
    const char *at = strstr(body, key);
    return at && at[strlen(key) + strspn(at + strlen(key), " :")] == 't';
}

/* Token ids are counted, text by its spaces: near enough for a figure that nothing is computed from. */
static int count_prompt(const char *body) {
    const char *at = strstr(body, "\"prompt\"");
    if (!at) at = strstr(body, "\"content\"");
    if (!at) return 1;
    at += strcspn(at, "[:");
    at += strspn(at, ": ");
    const char separator = *at == '[' ? ',' : ' ', last = *at == '[' ? ']' : '"';
    int count = 1;
    for (at++; *at && *at != last; at++) count += *at == separator;
    return count;
}

static void complete(int fd, const char *body, int is_chat) {
    struct connection *c = &connections[fd];
    const double received_s = now_s();
    c->request = num_requests++;
    c->mode = c->request % (uint32_t)odd_every == 0 ? odd : PLAIN;
    c->is_chat = is_chat;
    c->is_stream = is_true(body, "\"stream\"");
    c->wants_usage = is_true(body, "\"include_usage\"");
    c->wants_running_usage = is_true(body, "\"continuous_usage_stats\"");
    c->prompt_tokens = count_prompt(body);
    c->tokens_asked = number_after(body, "\"max_tokens\"");
    if (!c->tokens_asked) c->tokens_asked = number_after(body, "\"max_completion_tokens\"");
    if (fixed_tokens) c->tokens_asked = fixed_tokens;
    if (c->tokens_asked < 1) c->tokens_asked = 16;
    c->tokens_sent = c->chunks_sent = 0;
    c->is_busy = 1, num_running++, prompt_total += (unsigned)c->prompt_tokens;
    note(c->request, RECEIVED, 0, received_s);
    if (c->mode == BUSY) {
        put_plain(fd, "503 Service Unavailable", "Retry-After: 1\r\n", "application/json",
                  "{\"error\":{\"message\":\"queue full\",\"type\":\"unavailable\",\"code\":503}}");
        end(fd, ENDED_BADLY);
        return;
    }
    if (c->is_stream) {
        char bytes[FRAME];
        int n = sprintf(bytes, "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n");
        if (c->mode == ROLE_FIRST) {
            note(c->request, SENT_NO_TOKEN, 0, received_s);
            n += add_role(c, bytes + n);
        }
        put(fd, bytes, (size_t)n);
    }
    c->due_s = received_s + ttft_s;
    push(c->due_s, fd, c->request);
}

static void answer(int fd, const char *head, const char *body) {
    char text[FRAME];
    if (!strncmp(head, "POST ", 5) && strstr(head, "/chat/completions")) complete(fd, body, 1);
    else if (!strncmp(head, "POST ", 5) && strstr(head, "/completions")) complete(fd, body, 0);
    else if (!strncmp(head, "GET /v1/models", 14)) {
        snprintf(text, sizeof text, "{\"object\":\"list\",\"data\":[{\"id\":\"%s\",\"object\":\"model\",\"created\":1,"
                 "\"owned_by\":\"stub\",\"root\":\"%s\",\"max_model_len\":32768}]}", model, model);
        put_plain(fd, "200 OK", "", "application/json", text);
    } else if (!strncmp(head, "GET /metrics", 12)) {
        snprintf(text, sizeof text, "vllm:num_requests_running{engine=\"0\",model_name=\"%s\"} %u\n"
                 "vllm:num_requests_waiting{engine=\"0\",model_name=\"%s\"} 0\nvllm:kv_cache_usage_perc{engine=\"0\"} 0.1\n"
                 "vllm:num_preemptions_total{engine=\"0\"} 0\nvllm:prompt_tokens_total{engine=\"0\"} %llu\n"
                 "vllm:generation_tokens_total{engine=\"0\"} %llu\n", model, num_running, model, prompt_total, generated_total);
        put_plain(fd, "200 OK", "", "text/plain", text);
    } else if (!strncmp(head, "GET ", 4) || !strncmp(head, "HEAD ", 5)) put_plain(fd, "200 OK", "", "text/plain", "");
    else put_plain(fd, "404 Not Found", "", "text/plain", "");
}

static void receive(int fd) {
    struct connection *c = &connections[fd];
    if (c->in_size - c->in_used < 65536) c->in = realloc(c->in, c->in_size += 262144);
    ssize_t got = recv(fd, c->in + c->in_used, c->in_size - c->in_used - 1, MSG_DONTWAIT);
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (got <= 0) { drop(fd); return; }
    c->in_used += (size_t)got;
    c->in[c->in_used] = 0;
    while (c->is_open && !c->is_busy) {
        char *gap = strstr(c->in ? c->in : "", "\r\n\r\n");
        if (!gap) return;
        *gap = 0;
        const char *length = strcasestr(c->in, "\r\ncontent-length:");
        const size_t body_size = length ? (size_t)atol(length + 17) : 0, size = (size_t)(gap - c->in) + 4 + body_size;
        if (c->in_used < size) { *gap = '\r'; return; }
        c->close_after = strcasestr(c->in, "\r\nconnection: close") != NULL;
        const char after = c->in[size];
        c->in[size] = 0;
        answer(fd, c->in, gap + 4);
        if (!c->is_open) return;
        c->in[size] = after;
        memmove(c->in, c->in + size, (c->in_used -= size) + 1);
    }
}

static void stop(int signal) { (void)signal, stopped = 1; }

static int listener(int port) {
    const int fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0), on = 1;
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t size = sizeof at;
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (bind(fd, (struct sockaddr *)&at, size) || listen(fd, 4096)) { perror("listen"); exit(1); }
    getsockname(fd, (struct sockaddr *)&at, &size);
    printf("%d\n", ntohs(at.sin_port));
    fflush(stdout);
    return fd;
}

static void accept_all(int listening) {
    const int on = 1;
    for (int fd; (fd = accept4(listening, NULL, NULL, SOCK_NONBLOCK)) >= 0;) {
        if (fd >= MAX_FDS) { close(fd); continue; }
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
        connections[fd].is_open = 1;
        note((uint32_t)fd, OPENED, 0, now_s());
        struct epoll_event e = {.events = EPOLLIN, .data.fd = fd};
        epoll_ctl(epoll_fd, EPOLL_CTL_ADD, fd, &e);
    }
}

static void serve(int listening) {
    struct epoll_event ready[256];
    struct epoll_event e = {.events = EPOLLIN, .data.fd = listening};
    epoll_fd = epoll_create1(0);
    epoll_ctl(epoll_fd, EPOLL_CTL_ADD, listening, &e);
    while (!stopped) {
        /* Few at a time, so that a request which arrives in a burst of chunks is stamped soon. */
        for (int fired = 0; fired < MAX_FIRES && heap_size && heap[0].due_s <= now_s(); fired++) {
            const int fd = heap[0].fd;
            const uint32_t request = heap[0].request;
            pop();
            if (connections[fd].is_busy && connections[fd].request == request) fire(fd);
        }
        /* The last moment is spun away: waking up takes some of it, and a sleeper that is late delays a chunk. */
        double left_s = heap_size ? heap[0].due_s - now_s() - SPIN_S : 1.0;
        if (left_s < 0) left_s = 0;
        const struct timespec left = {(time_t)left_s, (long)(1e9 * (left_s - (double)(time_t)left_s))};
        const int n = (int)syscall(SYS_epoll_pwait2, epoll_fd, ready, 256, &left, NULL, (size_t)0);
        for (int i = 0; i < n; i++) {
            const int fd = ready[i].data.fd;
            if (fd == listening) accept_all(fd);
            else {
                if (ready[i].events & EPOLLOUT && connections[fd].out) put_rest(fd);
                if (ready[i].events & ~(unsigned)EPOLLOUT) receive(fd);
            }
        }
    }
}

int main(int argc, char **argv) {
    int port = 0;
    for (int i = 1; i + 1 < argc; i += 2) {
        const char *name = argv[i], *value = argv[i + 1];
        if (!strcmp(name, "--port")) port = atoi(value);
        else if (!strcmp(name, "--log")) log_file = fopen(value, "wb");
        else if (!strcmp(name, "--ttft-us")) ttft_s = 1e-6 * atof(value);
        else if (!strcmp(name, "--itl-us")) itl_s = 1e-6 * atof(value);
        else if (!strcmp(name, "--tokens")) fixed_tokens = atoi(value);
        else if (!strcmp(name, "--model")) model = value;
        else if (!strcmp(name, "--odd-every")) odd_every = atoi(value) > 0 ? atoi(value) : 1;
        else if (!strcmp(name, "--mode"))
            for (odd = PLAIN; odd < NUM_MODES && strcmp(MODES[odd], value);) odd++;
        else { fprintf(stderr, "unknown option %s\n", name); return 2; }
    }
    if (odd == NUM_MODES) { fprintf(stderr, "--mode is one of plain, error, role, empty, packed, cut, busy\n"); return 2; }
    if (log_file) setvbuf(log_file, NULL, _IOFBF, 1 << 20);
    prctl(PR_SET_TIMERSLACK, 1UL);
    signal(SIGTERM, stop), signal(SIGINT, stop), signal(SIGPIPE, SIG_IGN);
    serve(listener(port));
    if (log_file) fclose(log_file);
    return 0;
}
