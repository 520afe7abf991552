/*
 * Loads of files for bench/databases.py: the shapes of filebench's varmail, oltp and fileserver,
 * after their definitions and with the sizes of LSVD's table 2, scaled down. They are not
 * filebench, and docs/measurements/databases.md says where they deviate.
 *
 *   shapes KIND FOLDER 0          makes the files
 *   shapes KIND FOLDER SECONDS    runs, syncs the file system, and prints one line of JSON
 *
 * Invariants: a file belongs to at most one thread at a time; the time until the file system is
 * synced counts, so that nothing is left in memory that one disk writes later than another.
 * Not here: whose disk it is, and its counters.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define KIB 1024L
#define CHUNK_BYTES (1024 * KIB)
#define THREADS_MAX 64
#define FILES_PER_FOLDER 20
/* fileserver: bytes between two syncs of the file system, by whoever wrote the last of them. */
#define SYNC_EVERY_BYTES (512 * 1024 * KIB)
/* oltp: reads for each turn of a database writer and of the log's writer, and their writes. */
#define READS_PER_TURN 1000
#define READS_PER_LOG_WRITE 3200
#define WRITES_PER_TURN 100
#define RECORD_BYTES 2000
#define LOG_WRITE_BYTES (256 * KIB)
#define READERS 50
#define WRITERS 10

struct shape {
    const char *name;
    int files, threads, folders;
    long mean_bytes;
    /* Of each append; their mean is half of it. */
    long append_bytes_max;
};

/* varmail and fileserver begin with 80 % of their files; the last of oltp's files is its log. */
static const struct shape SHAPES[] = {
    {"varmail", 8000, 16, 1, 32 * KIB, 32 * KIB},
    {"fileserver", 6000, 50, 6000 / FILES_PER_FOLDER, 128 * KIB, 32 * KIB},
    {"oltp", 11, READERS + WRITERS + 1, 1, 20 * 1024 * KIB, 0},
};

enum presence { ABSENT, THERE, TAKEN };

/* What one thread has done. */
struct work {
    uint64_t dice;
    int number;
    long operations, read_bytes, written_bytes, syncs;
    uint64_t *waits_ns;
    long waits, waits_room;
    char *bytes;
};

static const struct shape *shape;
static const char *folder;
static int root;
static uint64_t end_ns;
static enum presence *presence;
static pthread_mutex_t files_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_mutex_t turns_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t turns_changed = PTHREAD_COND_INITIALIZER;
static pthread_mutex_t sync_lock = PTHREAD_MUTEX_INITIALIZER;
static _Atomic long unsynced_bytes;
/* oltp: reads that no writer has answered for. */
static long reads_for_writers, reads_for_log;

static void stop_with(const char *what)
{
    fprintf(stderr, "shapes: %s: %s\n", what, strerror(errno));
    exit(1);
}

static uint64_t now_ns(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (uint64_t)time.tv_sec * 1000000000 + (uint64_t)time.tv_nsec;
}

static int is_over(void)
{
    return now_ns() >= end_ns;
}

static uint64_t roll(uint64_t *dice)
{
    uint64_t mixed = *dice += 0x9e3779b97f4a7c15;
    mixed = (mixed ^ (mixed >> 30)) * 0xbf58476d1ce4e5b9;
    mixed = (mixed ^ (mixed >> 27)) * 0x94d049bb133111eb;
    return mixed ^ (mixed >> 31);
}

static double roll_unit(uint64_t *dice)
{
    return ((double)(roll(dice) >> 11) + 1) / 9007199254740993.0;
}

/* The size that a file is made with: gamma 1.5 around the mean, the same in every run. */
static long size_of(int file)
{
    uint64_t dice = (uint64_t)file * 7919 + 1;
    double normal = sqrt(-2 * log(roll_unit(&dice))) * cos(2 * M_PI * roll_unit(&dice));
    double gamma = -log(roll_unit(&dice)) + normal * normal / 2;
    double bytes = gamma / 1.5 * (double)shape->mean_bytes;
    return (long)fmin(fmax(bytes, 1), 8.0 * (double)shape->mean_bytes);
}

static void path_of(int file, char *path, size_t room)
{
    int in = shape->folders > 1 ? file / FILES_PER_FOLDER : 0;
    snprintf(path, room, "%s/%03d/%06d", folder, in, file);
}

static int opened(int file, int flags)
{
    char path[4096];
    path_of(file, path, sizeof path);
    int descriptor = open(path, flags | O_CLOEXEC, 0644);
    if (descriptor < 0)
        stop_with(path);
    return descriptor;
}

static void write_out(struct work *work, int descriptor, long bytes)
{
    while (bytes > 0) {
        long next_bytes = bytes < CHUNK_BYTES ? bytes : CHUNK_BYTES;
        ssize_t done = write(descriptor, work->bytes, (size_t)next_bytes);
        if (done <= 0)
            stop_with("write");
        bytes -= done;
        work->written_bytes += done;
    }
}

static void wait_took(struct work *work, uint64_t since_ns)
{
    if (work->waits == work->waits_room) {
        work->waits_room = work->waits_room ? 2 * work->waits_room : 4096;
        work->waits_ns = realloc(work->waits_ns, sizeof(uint64_t) * (size_t)work->waits_room);
        if (!work->waits_ns)
            stop_with("memory");
    }
    work->waits_ns[work->waits++] = now_ns() - since_ns;
}

/* A random file that is there, or is not; it is the thread's until `leave`. */
static int take(struct work *work, enum presence wanted)
{
    int found = -1;
    pthread_mutex_lock(&files_lock);
    int first = (int)(roll(&work->dice) % (uint64_t)shape->files);
    for (int step = 0; step < shape->files && found < 0; step++) {
        int file = (first + step) % shape->files;
        if (presence[file] == wanted)
            found = file;
    }
    if (found >= 0)
        presence[found] = TAKEN;
    pthread_mutex_unlock(&files_lock);
    return found;
}

static void leave(int file, enum presence is)
{
    pthread_mutex_lock(&files_lock);
    presence[file] = is;
    pthread_mutex_unlock(&files_lock);
}

static void read_whole(struct work *work, int descriptor)
{
    ssize_t done;
    while ((done = read(descriptor, work->bytes, CHUNK_BYTES)) > 0)
        work->read_bytes += done;
    if (done < 0)
        stop_with("read");
    work->operations++;
}

static void append(struct work *work, int descriptor)
{
    long bytes = 1 + (long)(roll(&work->dice) % (uint64_t)shape->append_bytes_max);
    if (lseek(descriptor, 0, SEEK_END) < 0)
        stop_with("seek");
    write_out(work, descriptor, bytes);
    work->operations++;
}

static void sync_file(struct work *work, int descriptor)
{
    uint64_t since_ns = now_ns();
    if (fsync(descriptor))
        stop_with("fsync");
    wait_took(work, since_ns);
    work->operations++;
    work->syncs++;
}

static void delete_one(struct work *work)
{
    char path[4096];
    int file = take(work, THERE);
    if (file < 0)
        return;
    path_of(file, path, sizeof path);
    if (unlink(path))
        stop_with(path);
    leave(file, ABSENT);
    work->operations++;
}

/* Each with its open and its close: delete; create, append, sync; read, append, sync; read. */
static void varmail(struct work *work)
{
    delete_one(work);
    for (int part = 0; part < 3; part++) {
        int file = take(work, part == 0 ? ABSENT : THERE);
        if (file < 0)
            continue;
        int descriptor = opened(file, O_RDWR | (part == 0 ? O_CREAT | O_TRUNC : 0));
        if (part > 0)
            read_whole(work, descriptor);
        if (part < 2) {
            append(work, descriptor);
            sync_file(work, descriptor);
        }
        close(descriptor);
        leave(file, THERE);
        work->operations += 2;
    }
}

/* What is deleted soon would never reach the disk otherwise. */
static void sync_all_when_due(long written_bytes)
{
    if ((unsynced_bytes += written_bytes) < SYNC_EVERY_BYTES)
        return;
    /* Who is here while another syncs has written as much again, and waits. */
    pthread_mutex_lock(&sync_lock);
    if (unsynced_bytes >= SYNC_EVERY_BYTES) {
        unsynced_bytes = 0;
        if (syncfs(root))
            stop_with("syncfs");
    }
    pthread_mutex_unlock(&sync_lock);
}

/* Create and write whole; append; read whole; delete; stat. No file is synced by itself. */
static void fileserver(struct work *work)
{
    char path[4096];
    struct stat about;
    uint64_t since_ns = now_ns();
    long before_bytes = work->written_bytes;
    for (int part = 0; part < 3; part++) {
        int file = take(work, part == 0 ? ABSENT : THERE);
        if (file < 0)
            continue;
        int descriptor = opened(file, O_RDWR | (part == 0 ? O_CREAT | O_TRUNC : 0));
        if (part == 0) {
            write_out(work, descriptor, size_of(file));
            work->operations++;
        } else if (part == 1) {
            append(work, descriptor);
        } else {
            read_whole(work, descriptor);
        }
        close(descriptor);
        leave(file, THERE);
        work->operations += 2;
    }
    delete_one(work);
    int file = take(work, THERE);
    if (file >= 0) {
        path_of(file, path, sizeof path);
        if (stat(path, &about))
            stop_with(path);
        leave(file, THERE);
        work->operations++;
    }
    wait_took(work, since_ns);
    sync_all_when_due(work->written_bytes - before_bytes);
}

/* Takes so many reads from a count; false when the time is over. */
static int take_turn(long *reads, long count)
{
    pthread_mutex_lock(&turns_lock);
    while (*reads < count && !is_over())
        pthread_cond_wait(&turns_changed, &turns_lock);
    int has_turn = *reads >= count;
    if (has_turn)
        *reads -= count;
    pthread_cond_broadcast(&turns_changed);
    pthread_mutex_unlock(&turns_lock);
    return has_turn;
}

/* A reader reads a record, and goes on unless the writers are two turns behind. */
static void oltp_read(struct work *work, const int *descriptors)
{
    int file = (int)(roll(&work->dice) % (uint64_t)(shape->files - 1));
    long record = (long)(roll(&work->dice) % (uint64_t)(shape->mean_bytes / RECORD_BYTES));
    ssize_t done = pread(descriptors[file], work->bytes, RECORD_BYTES, record * RECORD_BYTES);
    if (done < 0)
        stop_with("read");
    work->read_bytes += done;
    work->operations++;
    pthread_mutex_lock(&turns_lock);
    reads_for_writers++, reads_for_log++;
    if (reads_for_writers % READS_PER_TURN == 0 || reads_for_log % READS_PER_LOG_WRITE == 0)
        pthread_cond_broadcast(&turns_changed);
    while ((reads_for_writers >= 2 * READS_PER_TURN || reads_for_log >= 2 * READS_PER_LOG_WRITE) &&
           !is_over())
        pthread_cond_wait(&turns_changed, &turns_lock);
    pthread_mutex_unlock(&turns_lock);
}

static void oltp_write(struct work *work, int descriptor, long place, long bytes)
{
    uint64_t since_ns = now_ns();
    ssize_t done = pwrite(descriptor, work->bytes, (size_t)bytes, place * bytes);
    if (done != bytes)
        stop_with("write");
    wait_took(work, since_ns);
    work->written_bytes += done;
    work->operations++;
    work->syncs++;
}

/* Readers, database writers and the log's writer, whose writes are O_DSYNC. */
static void oltp(struct work *work, const int *descriptors)
{
    if (work->number < READERS)
        return oltp_read(work, descriptors);
    int is_log = work->number == READERS + WRITERS;
    if (is_log && take_turn(&reads_for_log, READS_PER_LOG_WRITE)) {
        long places = shape->mean_bytes / LOG_WRITE_BYTES;
        long place = (long)(roll(&work->dice) % (uint64_t)places);
        oltp_write(work, descriptors[shape->files - 1], place, LOG_WRITE_BYTES);
    }
    if (is_log || !take_turn(&reads_for_writers, READS_PER_TURN))
        return;
    for (int written = 0; written < WRITES_PER_TURN && !is_over(); written++) {
        int file = (work->number + written) % (shape->files - 1);
        long record = (long)(roll(&work->dice) % (uint64_t)(shape->mean_bytes / RECORD_BYTES));
        oltp_write(work, descriptors[file], record, RECORD_BYTES);
    }
}

static void *run(void *argument)
{
    struct work *work = argument;
    int descriptors[16] = {0};
    int is_oltp = !strcmp(shape->name, "oltp");
    for (int file = 0; is_oltp && file < shape->files; file++)
        descriptors[file] = opened(file, O_RDWR | (work->number < READERS ? 0 : O_DSYNC));
    while (!is_over()) {
        if (is_oltp)
            oltp(work, descriptors);
        else if (!strcmp(shape->name, "varmail"))
            varmail(work);
        else
            fileserver(work);
    }
    /* Whoever waits sees that the time is over. */
    pthread_cond_broadcast(&turns_changed);
    return NULL;
}

static struct work new_work(int number)
{
    struct work work = {.number = number, .dice = now_ns() + (uint64_t)number * 0x1234567};
    work.bytes = malloc(CHUNK_BYTES);
    if (!work.bytes)
        stop_with("memory");
    for (long at = 0; at < CHUNK_BYTES; at += 8) {
        uint64_t word = roll(&work.dice);
        memcpy(work.bytes + at, &word, sizeof word);
    }
    return work;
}

/* Makes the folders and files that are there at first. */
static void make(void)
{
    char path[4096];
    struct work work = new_work(0);
    int is_oltp = !strcmp(shape->name, "oltp");
    for (int in = 0; in < shape->folders; in++) {
        snprintf(path, sizeof path, "%s/%03d", folder, in);
        if (mkdir(path, 0755))
            stop_with(path);
    }
    for (int file = 0; file < shape->files; file++) {
        if (!is_oltp && file % 5 == 4)
            continue;
        int descriptor = opened(file, O_WRONLY | O_CREAT | O_EXCL);
        write_out(&work, descriptor, is_oltp ? shape->mean_bytes : size_of(file));
        close(descriptor);
    }
}

static int is_before(const void *one, const void *other)
{
    uint64_t left = *(const uint64_t *)one, right = *(const uint64_t *)other;
    return (left > right) - (left < right);
}

/* Adds up what the threads have done, into the first of them. */
static void report(struct work *all, double seconds, double synced_s)
{
    struct work *sum = &all[0];
    for (int number = 1; number < shape->threads; number++) {
        struct work *one = &all[number];
        sum->operations += one->operations, sum->syncs += one->syncs;
        sum->read_bytes += one->read_bytes, sum->written_bytes += one->written_bytes;
        sum->waits_ns = realloc(sum->waits_ns,
                                sizeof(uint64_t) * (size_t)(sum->waits + one->waits + 1));
        if (!sum->waits_ns)
            stop_with("memory");
        for (long at = 0; at < one->waits; at++)
            sum->waits_ns[sum->waits++] = one->waits_ns[at];
    }
    if (!sum->waits)
        stop_with("nothing was done");
    qsort(sum->waits_ns, (size_t)sum->waits, sizeof(uint64_t), is_before);
    printf("{\"operations\": %ld, \"seconds\": %.4f, \"synced_s\": %.4f, \"syncs\": %ld, "
           "\"read_bytes\": %ld, \"file_bytes\": %ld, \"p50_us\": %.1f, \"p99_us\": %.1f}\n",
           sum->operations, seconds, synced_s, sum->syncs, sum->read_bytes, sum->written_bytes,
           (double)sum->waits_ns[sum->waits / 2] / 1e3,
           (double)sum->waits_ns[sum->waits * 99 / 100] / 1e3);
}

static void measure(double seconds)
{
    static struct work all[THREADS_MAX];
    pthread_t threads[THREADS_MAX];
    root = open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (root < 0)
        stop_with(folder);
    for (int number = 0; number < shape->threads; number++)
        all[number] = new_work(number);
    uint64_t start_ns = now_ns();
    end_ns = start_ns + (uint64_t)(seconds * 1e9);
    for (int number = 0; number < shape->threads; number++)
        if (pthread_create(&threads[number], NULL, run, &all[number]))
            stop_with("a thread");
    for (int number = 0; number < shape->threads; number++)
        pthread_join(threads[number], NULL);
    double took_s = (double)(now_ns() - start_ns) / 1e9;
    if (syncfs(root))
        stop_with(folder);
    report(all, took_s, (double)(now_ns() - start_ns) / 1e9);
}

int main(int argc, char **argv)
{
    char path[4096];
    for (size_t at = 0; argc == 4 && at < sizeof SHAPES / sizeof *SHAPES; at++)
        if (!strcmp(argv[1], SHAPES[at].name))
            shape = &SHAPES[at];
    if (!shape) {
        fprintf(stderr, "usage: shapes varmail|oltp|fileserver FOLDER SECONDS\n");
        return 2;
    }
    folder = argv[2];
    double seconds = strtod(argv[3], NULL);
    presence = calloc((size_t)shape->files, sizeof *presence);
    if (!presence)
        stop_with("memory");
    if (seconds <= 0) {
        make();
        return 0;
    }
    for (int file = 0; file < shape->files; file++) {
        path_of(file, path, sizeof path);
        presence[file] = access(path, F_OK) ? ABSENT : THERE;
    }
    measure(seconds);
    return 0;
}
