/* The judge of load clients: a server whose answers are paced to a plan and whose true send times are kept.
 *
 * It speaks the streaming dialect of the three endpoints that the load client uses. One thread, one epoll, one timer:
 * every `step` nanoseconds each running stream gets one event, as a batching engine makes them (lockstep); a share of the
 * steps is longer (a stall that every stream sees), and a request waits a while before its first event. Plan and random
 * numbers depend on the seed and on ordinal numbers alone, so two runs of one load are paced alike.
 *
 *   judge --step-ns N --stall-ppm P --stall-ns N --first-min-ns N --first-max-ns N --tokens-per-event K --seed S
 *
 * Prints "PORT n" when it listens on 127.0.0.1, and ends when its standard input does.
 *   GET /judge/truth   little-endian int64: version, requests, lag count, lag sum ns, lag max ns, blocked writes; then for
 *                      each request: ordinal, accepted, read, tokens, events, and the send time of each event.
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
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>

enum api { GENERATE, COMPLETIONS, CHAT };
enum { MAX_TOKENS = 1 << 20, LONG_TEXT = 1 << 16 };

struct request {
    int64_t ordinal, accepted, read, tokens, events;
    int64_t *sent;
    int64_t room;
};
struct buffer {
    char *bytes;
    size_t length, room, done;
};
struct stream {
    int fd;
    enum api api;
    struct buffer in, out;
    struct request *request;
    int64_t accepted, first_due;
    int usage, running, started, wants_write;
    int64_t index, count;
    struct stream *previous, *next; /* in the list of waiting or running streams */
};

static const char *WORD[8] = {" lorem", " ipsum", " dolor", " sit", " amet", " sed", " do", " ut"};
static int64_t step_ns = 20000000, stall_ppm = 20000, stall_ns = 40000000, first_min = 50000000, first_max = 150000000;
static int64_t per_event = 1, seed = 1, ordinal;
static int64_t lag_count, lag_sum, lag_max, blocked;
static int poller, timer;
static struct request **requests;
static size_t request_count, request_room;
static struct stream waiting, running; /* list heads */
static int64_t next_step, step_number;
static struct buffer text, ids; /* what /generate repeats: grown as needed, with the end of each token */
static size_t *text_end, *ids_end, known_tokens, known_room;

static int64_t now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}
static void fatal(const char *what) {
    perror(what);
    exit(1);
}
static void *grown(void *p, size_t size) {
    p = realloc(p, size);
    if (!p) fatal("memory");
    return p;
}
/* SplitMix64 of (seed, stream of numbers, ordinal): a number in [0, 1) that does not depend on the order of events. */
static double chance(uint64_t kind, uint64_t number) {
    uint64_t z = (uint64_t)seed * 0x9E3779B97F4A7C15ULL + kind * 0xD1B54A32D192ED03ULL + number * 0x8CB92BA72F3D8DD7ULL;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ULL;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBULL;
    return (double)((z ^ (z >> 31)) >> 11) / 9007199254740992.0;
}
static void put(struct buffer *b, const char *bytes, size_t n) {
    if (b->length + n > b->room) {
        b->room = (b->length + n) * 2 + 1024;
        b->bytes = grown(b->bytes, b->room);
    }
    memcpy(b->bytes + b->length, bytes, n);
    b->length += n;
}
static void unlink_stream(struct stream *s) {
    if (!s->next) return;
    s->previous->next = s->next;
    s->next->previous = s->previous;
    s->next = s->previous = NULL;
}
static void link_last(struct stream *head, struct stream *s) {
    s->previous = head->previous;
    s->next = head;
    head->previous->next = s;
    head->previous = s;
}
static void watch(struct stream *s, int write) {
    if (s->wants_write == write) return;
    s->wants_write = write;
    struct epoll_event e = {.events = EPOLLIN | (write ? EPOLLOUT : 0), .data.ptr = s};
    epoll_ctl(poller, EPOLL_CTL_MOD, s->fd, &e);
}
/* Closed streams are freed after the round of events in which they closed: the round may still hold pointers to them. */
static struct stream *graveyard[65536];
static int buried;
static void hang_up(struct stream *s) {
    if (s->fd < 0) return;
    unlink_stream(s);
    epoll_ctl(poller, EPOLL_CTL_DEL, s->fd, NULL);
    close(s->fd);
    s->fd = -1;
    if (buried < 65536) graveyard[buried++] = s;
}
static void flush(struct stream *s) {
    struct buffer *b = &s->out;
    while (b->done < b->length) {
        ssize_t n = send(s->fd, b->bytes + b->done, b->length - b->done, MSG_NOSIGNAL);
        if (n > 0) {
            b->done += (size_t)n;
        } else if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
            blocked++;
            watch(s, 1);
            return;
        } else {
            hang_up(s);
            return;
        }
    }
    b->length = b->done = 0;
    watch(s, 0);
}
static void put_chunk(struct buffer *out, const char *event, size_t n) {
    char head[24];
    put(out, head, (size_t)snprintf(head, sizeof head, "%zx\r\n", n));
    put(out, event, n);
    put(out, "\r\n", 2);
}
static void know_tokens(size_t n) {
    if (n > known_room) {
        known_room = n * 2;
        text_end = grown(text_end, known_room * sizeof *text_end);
        ids_end = grown(ids_end, known_room * sizeof *ids_end);
    }
    for (; known_tokens < n; known_tokens++) {
        char id[24];
        const char *word = WORD[known_tokens & 7];
        put(&text, word, strlen(word));
        put(&ids, id, (size_t)snprintf(id, sizeof id, "%s%zu", known_tokens ? "," : "", 1000 + (known_tokens & 7)));
        text_end[known_tokens] = text.length;
        ids_end[known_tokens] = ids.length;
    }
}
static struct buffer scratch;
static void say(struct stream *s, const char *format, ...) __attribute__((format(printf, 2, 3)));
#include <stdarg.h>
static void say(struct stream *s, const char *format, ...) {
    char line[4096];
    va_list arguments;
    va_start(arguments, format);
    int n = vsnprintf(line, sizeof line, format, arguments);
    va_end(arguments);
    put_chunk(&s->out, line, (size_t)n);
}
static const char *object_of(enum api api) { return api == CHAT ? "chat.completion.chunk" : "text_completion"; }

/* One event of a stream: up to per_event tokens (the first event has one), then what closes the answer. */
static void emit(struct stream *s) {
    struct request *r = s->request;
    int64_t n = s->index == 0 ? 1 : per_event;
    if (n > s->count - s->index) n = s->count - s->index;
    int last = s->index + n >= s->count;
    char words[1024];
    size_t w = 0;
    for (int64_t i = 0; i < n && w < sizeof words - 16; i++) {
        const char *word = WORD[(s->index + i) & 7];
        memcpy(words + w, word, strlen(word));
        w += strlen(word);
    }
    words[w] = 0;
    s->index += n;
    unsigned long id = (unsigned long)r->ordinal;
    if (s->api == COMPLETIONS) {
        say(s, "data: {\"id\":\"judge-%016lx\",\"object\":\"text_completion\",\"created\":1,\"model\":\"judge\",\"choices\":[{"
               "\"index\":0,\"text\":\"%s\",\"logprobs\":null,\"finish_reason\":%s,\"matched_stop\":null}],\"usage\":null}\n\n",
            id, words, last ? "\"length\"" : "null");
    } else if (s->api == CHAT) {
        if (s->index == n)
            say(s, "data: {\"id\":\"judge-%016lx\",\"object\":\"%s\",\"created\":1,\"model\":\"judge\",\"choices\":[{\"index\":0,"
                   "\"delta\":{\"role\":\"assistant\",\"content\":\"\"},\"finish_reason\":null}]}\n\n", id, object_of(CHAT));
        say(s, "data: {\"id\":\"judge-%016lx\",\"object\":\"%s\",\"created\":1,\"model\":\"judge\",\"choices\":[{\"index\":0,"
               "\"delta\":{\"content\":\"%s\"},\"finish_reason\":null}]}\n\n", id, object_of(CHAT), words);
        if (last)
            say(s, "data: {\"id\":\"judge-%016lx\",\"object\":\"%s\",\"created\":1,\"model\":\"judge\",\"choices\":[{\"index\":0,"
                   "\"delta\":{},\"finish_reason\":\"length\"}]}\n\n", id, object_of(CHAT));
    } else {
        char tail[512];
        know_tokens((size_t)s->index);
        scratch.length = 0;
        put(&scratch, "data: {\"text\":\"", 15);
        put(&scratch, text.bytes, text_end[s->index - 1]);
        put(&scratch, "\",\"output_ids\":[", 16);
        put(&scratch, ids.bytes, ids_end[s->index - 1]);
        char finish[64] = "null";
        if (last) snprintf(finish, sizeof finish, "{\"type\":\"length\",\"length\":%ld}", (long)s->count);
        put(&scratch, tail, (size_t)snprintf(tail, sizeof tail,
            "],\"meta_info\":{\"id\":\"judge-%016lx\",\"finish_reason\":%s,\"prompt_tokens\":8,\"completion_tokens\":%ld,"
            "\"cached_tokens\":0}}\n\n", id, finish, (long)s->index));
        put_chunk(&s->out, scratch.bytes, scratch.length);
    }
    if (last) {
        if (s->usage && s->api != GENERATE)
            say(s, "data: {\"id\":\"judge-%016lx\",\"object\":\"%s\",\"created\":1,\"model\":\"judge\",\"choices\":[],\"usage\":{"
                   "\"prompt_tokens\":8,\"total_tokens\":%ld,\"completion_tokens\":%ld}}\n\n",
                id, object_of(s->api), (long)s->count + 8, (long)s->count);
        say(s, "data: [DONE]\n\n");
        put(&s->out, "0\r\n\r\n", 5);
        s->running = 0;
        unlink_stream(s);
    }
    if (r->events == r->room) {
        r->room = r->room ? r->room * 2 : 16;
        r->sent = grown(r->sent, (size_t)r->room * sizeof *r->sent);
    }
    r->tokens = s->index;
    r->sent[r->events++] = now();
    flush(s);
}
static void answer(struct stream *s, int status, const char *type, const void *body, size_t n) {
    char head[256];
    put(&s->out, head, (size_t)snprintf(head, sizeof head,
        "HTTP/1.1 %d judge\r\ncontent-type: %s\r\ncontent-length: %zu\r\n\r\n", status, type, n));
    put(&s->out, body, n);
    flush(s);
}
static void tell_truth(struct stream *s) {
    struct buffer b = {0};
    int64_t head[6] = {1, (int64_t)request_count, lag_count, lag_sum, lag_max, blocked};
    put(&b, (char *)head, sizeof head);
    for (size_t i = 0; i < request_count; i++) {
        struct request *r = requests[i];
        int64_t row[5] = {r->ordinal, r->accepted, r->read, r->tokens, r->events};
        put(&b, (char *)row, sizeof row);
        put(&b, (char *)r->sent, (size_t)r->events * sizeof *r->sent);
    }
    answer(s, 200, "application/octet-stream", b.bytes, b.length);
    free(b.bytes);
}
static int64_t number_after(const char *body, const char *key, int64_t fallback) {
    const char *at = NULL;
    for (const char *p = body; (p = strstr(p, key)); p++) at = p + strlen(key); /* the last one: prompts come first */
    return at ? strtoll(at, NULL, 10) : fallback;
}
static void begin(struct stream *s, enum api api, const char *body) {
    struct request *r = calloc(1, sizeof *r);
    if (!r) fatal("memory");
    r->ordinal = ++ordinal;
    r->accepted = s->accepted;
    r->read = now();
    if (request_count == request_room) {
        request_room = request_room ? request_room * 2 : 1024;
        requests = grown(requests, request_room * sizeof *requests);
    }
    requests[request_count++] = r;
    s->request = r;
    s->api = api;
    s->index = 0;
    s->count = number_after(body, api == GENERATE ? "\"max_new_tokens\":" : "\"max_tokens\":", 16);
    if (s->count < 1 || s->count > MAX_TOKENS) s->count = 16;
    s->usage = strstr(body, "\"include_usage\":true") || strstr(body, "\"include_usage\": true");
    s->running = 1;
    s->first_due = r->read + first_min + (int64_t)(chance(1, (uint64_t)r->ordinal) * (double)(first_max - first_min));
    static const char head[] = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
                               "transfer-encoding: chunked\r\n\r\n";
    put(&s->out, head, sizeof head - 1);
    link_last(&waiting, s);
    flush(s);
}
static void handle(struct stream *s, const char *head, const char *body) {
    if (!strncmp(head, "POST /generate ", 15)) begin(s, GENERATE, body);
    else if (!strncmp(head, "POST /v1/completions ", 21)) begin(s, COMPLETIONS, body);
    else if (!strncmp(head, "POST /v1/chat/completions ", 26)) begin(s, CHAT, body);
    else if (!strncmp(head, "GET /judge/truth ", 17)) tell_truth(s);
    else if (!strncmp(head, "GET /v1/models ", 15)) {
        static const char models[] = "{\"object\":\"list\",\"data\":[{\"id\":\"judge\",\"object\":\"model\"}]}";
        answer(s, 200, "application/json", models, sizeof models - 1);
    } else if (!strncmp(head, "GET /health ", 12)) answer(s, 200, "application/json", "{}", 2);
    else answer(s, 404, "application/json", "{\"detail\":\"Not Found\"}", 22);
}
static void take_requests(struct stream *s) {
    while (s->fd >= 0 && !s->running && s->in.length) {
        put(&s->in, "", 1);
        s->in.length--;
        char *end = strstr(s->in.bytes, "\r\n\r\n");
        if (!end) return;
        size_t head = (size_t)(end - s->in.bytes) + 4, body = 0;
        *end = 0;
        char *length = strcasestr(s->in.bytes, "\r\ncontent-length:");
        if (length) body = strtoul(length + 17, NULL, 10);
        *end = '\r';
        if (s->in.length < head + body) return;
        char kept = s->in.bytes[head + body];
        s->in.bytes[head + body] = 0;
        handle(s, s->in.bytes, s->in.bytes + head);
        s->in.bytes[head + body] = kept;
        s->in.length -= head + body;
        memmove(s->in.bytes, s->in.bytes + head + body, s->in.length);
    }
}
static void receive(struct stream *s) {
    static char block[1 << 18];
    for (;;) {
        ssize_t n = recv(s->fd, block, sizeof block, 0);
        if (n == 0 || (n < 0 && errno != EAGAIN && errno != EWOULDBLOCK)) {
            hang_up(s);
            return;
        }
        if (n < 0) break;
        put(&s->in, block, (size_t)n);
        if ((size_t)n < sizeof block) break;
    }
    take_requests(s);
}
static void set_timer(void) {
    int64_t due = running.next != &running ? next_step : INT64_MAX;
    for (struct stream *s = waiting.next; s != &waiting; s = s->next)
        if (s->first_due < due) due = s->first_due;
    struct itimerspec t = {0};
    if (due != INT64_MAX) {
        t.it_value.tv_sec = due / 1000000000;
        t.it_value.tv_nsec = due % 1000000000;
        if (due <= 0) t.it_value.tv_nsec = 1;
    }
    timerfd_settime(timer, TFD_TIMER_ABSTIME, &t, NULL);
}
static void note_lag(int64_t lag) {
    lag_count++;
    lag_sum += lag;
    if (lag > lag_max) lag_max = lag;
}
static void work(void) {
    int64_t t = now();
    for (struct stream *s = waiting.next, *after; s != &waiting; s = after) {
        after = s->next;
        if (s->first_due > t) continue;
        note_lag(t - s->first_due);
        unlink_stream(s);
        if (running.next == &running && next_step < t) next_step = t + step_ns;
        link_last(&running, s);
        emit(s);
        take_requests(s);
    }
    t = now();
    if (running.next == &running || t < next_step) return;
    note_lag(t - next_step);
    struct stream *end = running.previous; /* streams that join while this step is sent wait for the next one */
    for (struct stream *s = running.next, *after; s != &running; s = after) {
        int was_end = s == end;
        after = s->next;
        emit(s);
        take_requests(s);
        if (was_end) break;
    }
    next_step += step_ns;
    if (chance(2, (uint64_t)++step_number) * 1e6 < (double)stall_ppm) next_step += stall_ns;
    if (next_step < now() - 1000000000) next_step = now(); /* no more than a second of debt is made up for */
}
static void accept_all(int listener) {
    for (;;) {
        int fd = accept4(listener, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
        if (fd < 0) return;
        int one = 1;
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
        struct stream *s = calloc(1, sizeof *s);
        if (!s) fatal("memory");
        s->fd = fd;
        s->accepted = now();
        struct epoll_event e = {.events = EPOLLIN, .data.ptr = s};
        epoll_ctl(poller, EPOLL_CTL_ADD, fd, &e);
    }
}
int main(int argc, char **argv) {
    const struct { const char *name; int64_t *value; } options[] = {
        {"--step-ns", &step_ns}, {"--stall-ppm", &stall_ppm}, {"--stall-ns", &stall_ns}, {"--first-min-ns", &first_min},
        {"--first-max-ns", &first_max}, {"--tokens-per-event", &per_event}, {"--seed", &seed}};
    for (int i = 1; i < argc; i += 2) {
        int known = 0;
        for (size_t k = 0; k < sizeof options / sizeof *options; k++)
            if (i + 1 < argc && !strcmp(argv[i], options[k].name)) {
                *options[k].value = strtoll(argv[i + 1], NULL, 10);
                known = 1;
            }
        if (!known) {
            fprintf(stderr, "judge: unknown or incomplete option %s\n", argv[i]);
            return 2;
        }
    }
    if (step_ns < 1 || per_event < 1 || per_event > 100 || first_max < first_min) {
        fprintf(stderr, "judge: impossible plan\n");
        return 2;
    }
    signal(SIGPIPE, SIG_IGN);
    struct rlimit limit;
    getrlimit(RLIMIT_NOFILE, &limit);
    limit.rlim_cur = limit.rlim_max;
    setrlimit(RLIMIT_NOFILE, &limit);
    waiting.next = waiting.previous = &waiting;
    running.next = running.previous = &running;
    int listener = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t size = sizeof address;
    if (listener < 0 || bind(listener, (void *)&address, size) || listen(listener, 4096) ||
        getsockname(listener, (void *)&address, &size))
        fatal("listen");
    poller = epoll_create1(EPOLL_CLOEXEC);
    timer = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC);
    if (poller < 0 || timer < 0) fatal("epoll");
    static struct stream marks[3]; /* listener, timer, standard input */
    int special[3] = {listener, timer, STDIN_FILENO};
    for (int i = 0; i < 3; i++) {
        struct epoll_event e = {.events = EPOLLIN, .data.ptr = &marks[i]};
        if (epoll_ctl(poller, EPOLL_CTL_ADD, special[i], &e) && i < 2) fatal("epoll_ctl");
    }
    printf("PORT %d\n", ntohs(address.sin_port));
    fflush(stdout);
    static struct epoll_event events[1024];
    for (;;) {
        set_timer();
        int n = epoll_wait(poller, events, 1024, -1);
        for (int i = 0; i < n; i++) {
            struct stream *s = events[i].data.ptr;
            if (s == &marks[0]) {
                accept_all(listener);
            } else if (s == &marks[1]) {
                uint64_t expirations;
                (void)!read(timer, &expirations, sizeof expirations);
            } else if (s == &marks[2]) {
                char rest[256];
                if (read(STDIN_FILENO, rest, sizeof rest) <= 0) return 0;
            } else if (s->fd >= 0) {
                if (events[i].events & EPOLLOUT) flush(s);
                if (s->fd >= 0 && events[i].events & (EPOLLIN | EPOLLHUP | EPOLLERR)) receive(s);
            }
        }
        work();
        while (buried) {
            struct stream *s = graveyard[--buried];
            free(s->in.bytes);
            free(s->out.bytes);
            free(s);
        }
    }
}
