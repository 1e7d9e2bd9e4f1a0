/* Arguments of the fault harnesses: the same words in each, and those tests/release uses. */

#include "tests/crash/drive.h"

#include "tests/driver/scratch.h"
#include "tests/harness.h"
#include "tests/planted.h"

#include <fcntl.h>
#include <getopt.h>
#include <unistd.h>

enum { OPT_COUNT = 1, OPT_FIRST, OPT_CASE, OPT_SEED, OPT_PLANT, OPT_DIR };

static const struct option long_options[] = {
    {"count", required_argument, NULL, OPT_COUNT},
    {"kills", required_argument, NULL, OPT_COUNT},
    {"cuts", required_argument, NULL, OPT_COUNT},
    {"flips", required_argument, NULL, OPT_COUNT},
    {"first", required_argument, NULL, OPT_FIRST},
    {"case", required_argument, NULL, OPT_CASE},
    {"seed", required_argument, NULL, OPT_SEED},
    {"plant", required_argument, NULL, OPT_PLANT},
    {"dir", required_argument, NULL, OPT_DIR},
    {"expect-loss", no_argument, NULL, 'l'},
    {"encrypt", no_argument, NULL, 'e'},
    {"idle", no_argument, NULL, 'i'},
    {"verbose", no_argument, NULL, 'v'},
    {"keep", no_argument, NULL, 'k'},
    {"help", no_argument, NULL, 'h'},
    {0},
};

static const char common[] =
    "  --count N      the same, as tests/release calls it\n"
    "  --seed S       default 1\n"
    "  --first K      first case (default 0)\n"
    "  --case K       this one only\n"
    "  --plant NAME   on a daemon with that bug (cached-test): a loss must be found, exit code 1\n"
    "  --expect-loss  exit 0 only if a loss was found\n"
    "  --encrypt      with ssd.encryption = on; without it one round in four, of bitflip none\n"
    "  --idle         exit 0 only if a run in which nothing happens is refused as one\n"
    "  --dir DIR      where the state goes (default /tmp); the log goes to another file system\n"
    "  --verbose, --keep  say more; keep the directories\n"
    "\n"
    "exit code: 0 nothing lost, 1 a loss or a refusal, 2 wrong usage, 77 not possible here\n"
    "\n"
    "planted bugs that it finds:\n";

static _Noreturn void usage(const struct cr_options *options, const char *help, int code)
{
    (void)fprintf(code == 0 ? stdout : stderr, "usage: %s [--%s N] [--seed S] ...\n\n%s%s",
                  options->program, options->unit, help, common);
    planted_list(options->program, code == 0 ? stdout : stderr);
    exit(code);
}

static bool take_number(struct cr_options *options, int option, const char *text)
{
    uint64_t number;
    if (!ex_parse_number(text, option == OPT_SEED ? UINT64_MAX : 100000000, &number)) return false;
    if (option == OPT_SEED) options->seed = number;
    if (option == OPT_COUNT) options->count = (uint32_t)number;
    if (option == OPT_FIRST || option == OPT_CASE) options->first = (uint32_t)number;
    if (option == OPT_CASE) {
        options->count = 1;
        options->verbose = true;
    }
    return true;
}

static bool take(struct cr_options *options, int option)
{
    switch (option) {
    case OPT_PLANT:
        options->plant = optarg;
        return true;
    case OPT_DIR:
        options->dir = optarg;
        return true;
    case 'l':
        options->expect_loss = true;
        return true;
    case 'e':
        options->encrypt = true;
        return true;
    case 'i':
        options->idle = true;
        return true;
    case 'v':
        options->verbose = true;
        return true;
    case 'k':
        options->keep = true;
        return true;
    default:
        /* '?': unknown, or without its argument. */
        return option <= OPT_SEED && take_number(options, option, optarg);
    }
}

void cr_parse(int argc, char **argv, const char *help, struct cr_options *options)
{
    int option;
    while ((option = getopt_long(argc, argv, "", long_options, NULL)) != -1) {
        if (option == 'h') usage(options, help, EXIT_SUCCESS);
        if (!take(options, option)) usage(options, help, CR_EXIT_USAGE);
    }
    if (optind < argc || options->count == 0) usage(options, help, CR_EXIT_USAGE);
    if (options->plant != NULL && !planted_check(options->program, options->plant))
        exit(CR_EXIT_USAGE);
    /* Slow builds run fewer: CACHED_TEST_DIVISOR, as in every test.  A search for a planted bug
     * ends where it is found, and is as long everywhere. */
    if (options->plant == NULL) options->count = (uint32_t)harness_count(options->count);
    if (!options->keep) ex_clean_after();
}

void cr_make_key(const char *dir)
{
    char path[400];
    uint8_t key[32];
    for (uint8_t i = 0; i < sizeof(key); i++)
        key[i] = i;
    (void)snprintf(path, sizeof(path), "%s/" CR_KEY_NAME, dir);
    const int fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    EXPECT(fd >= 0 && write(fd, key, sizeof(key)) == (ssize_t)sizeof(key));
    EXPECT(close(fd) == 0);
}
