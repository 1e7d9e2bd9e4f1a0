/*
 * Makes a model with random weights in the released formats: config.json, shards, compressed ids.
 *
 * This file reads the command line and the config; the numbers come from mkmodel_fill.c and
 * mkmodel_bigram.c, the files from mkmodel_write.c, and which tensors there are from the engine's
 * own list.  `--plain` leaves out Engram and drafting, by taking their fields from the config.
 */

#include "tools/mkmodel.h"

#include "engine/model/model_limits.h"
#include "kvstore/base/bytes.h"

#include <errno.h>
#include <getopt.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>

enum { EXIT_USAGE = 2 };

static void print_usage(FILE *out)
{
    (void)fprintf(
        out,
        "usage: mkmodel [--config tiny|small|v41-flash|FILE] [--seed N] [--shards N] [--bigram]\n"
        "               [--plain] [--force] DIR\n"
        "\n"
        "Writes a model with random weights to DIR: config.json, model.safetensors (or shards\n"
        "and their index) and, with Engram, engram_ids.bin.  A model of mkmodel's that is there "
        "is\n"
        "replaced, what a killed mkmodel left is removed.  A model that mkmodel did not make is\n"
        "not touched, nor is a directory that holds other files and no model of mkmodel's.\n"
        "\n"
        "  --config NAME|FILE  a name, or a config.json (default: tiny)\n"
        "  --seed N            same seed, same bytes (default 1)\n"
        "  --shards N          as N files with model.safetensors.index.json (default 1)\n"
        "  --bigram            weights that know which token follows which: the next higher\n"
        "                      ordinary id, after the last the first; drafts are right\n"
        "  --plain             without Engram and drafting\n"
        "  --force             replace any model in DIR, whoever made it; other files stay\n"
        "  --help              this text\n"
        "\n"
        "exit code: 0 done, 1 failed, 2 wrong usage\n");
}

static int usage_error(const char *text, const char *value)
{
    (void)fprintf(stderr, "mkmodel: %s%s\n", text, value);
    print_usage(stderr);
    return EXIT_USAGE;
}

static bool read_number(const char *text, uint64_t min, uint64_t max, uint64_t *ret_value)
{
    char *end = NULL;
    errno = 0;
    const unsigned long long value = strtoull(text, &end, 10);
    if (errno != 0 || *end != '\0' || *text < '0' || *text > '9') return false;
    if (value < min || value > max) return false;
    *ret_value = value;
    return true;
}

static char *read_file(const char *path)
{
    char *text = calloc(1, ENG_CONFIG_BYTES_MAX + 1);
    FILE *file = fopen(path, "rb");
    const size_t bytes =
        file != NULL && text != NULL ? fread(text, 1, ENG_CONFIG_BYTES_MAX + 1, file) : 0;

    if (file != NULL) (void)fclose(file);
    if (bytes > 0 && bytes <= ENG_CONFIG_BYTES_MAX) return text;
    (void)fprintf(stderr,
                  "mkmodel: %s: no config that can be read; tiny, small and v41-flash are "
                  "built in\n",
                  path);
    free(text);
    return NULL;
}

static char *config_text(const char *name)
{
    const char *known = eng_config_text(name);
    return known != NULL ? strdup(known) : read_file(name);
}

/* Members of an object, one a line; what is in them on the same line. */
static bool append_members(const json_t *object, const char *indent, const char *nested, char *to,
                           size_t to_max)
{
    size_t left = json_object_size(object);
    const char *name;
    json_t *value;

    json_object_foreach((json_t *)(uintptr_t)object, name, value)
    {
        char *text = json_dumps(value, JSON_ENCODE_ANY | JSON_REAL_PRECISION(9));
        const size_t used = strlen(to);
        const char *comma = --left > 0 ? "," : "";
        if (text == NULL) return false;
        if (nested != NULL && strcmp(name, nested) == 0) {
            (void)snprintf(to + used, to_max - used, "%s\"%s\": {\n", indent, name);
            if (!append_members(value, "    ", NULL, to, to_max)) return false;
            const size_t end = strlen(to);
            (void)snprintf(to + end, to_max - end, "%s}%s\n", indent, comma);
        } else {
            (void)snprintf(to + used, to_max - used, "%s\"%s\": %s%s\n", indent, name, text, comma);
        }
        free(text);
    }
    return strlen(to) + 8 < to_max;
}

/* The config without Engram and drafting. */
static char *make_plain(const char *text, const struct eng_config *config)
{
    json_t *root = json_loads(text, 0, NULL);
    json_t *fields = json_object_get(root, "text_config");
    json_t *part = fields != NULL ? fields : root;
    json_t *ratios = json_object_get(part, "compress_ratios");
    char *plain = calloc(1, ENG_CONFIG_BYTES_MAX);
    void *next = NULL;
    const char *name;
    json_t *value;

    json_object_foreach_safe(part, next, name, value)
    {
        if (strncmp(name, "engram_", 7) == 0 || strncmp(name, "dspark_", 7) == 0)
            (void)json_object_del(part, name);
    }
    while (json_array_size(ratios) > config->layers)
        (void)json_array_remove(ratios, json_array_size(ratios) - 1);
    bool ok = plain != NULL && json_object_set_new(part, "engram_layer_ids", json_array()) == 0 &&
              json_object_set_new(part, "num_nextn_predict_layers", json_integer(0)) == 0;
    if (ok) {
        (void)snprintf(plain, ENG_CONFIG_BYTES_MAX, "{\n");
        ok = append_members(root, "  ", "text_config", plain, ENG_CONFIG_BYTES_MAX);
        const size_t end = strlen(plain);
        (void)snprintf(plain + end, ENG_CONFIG_BYTES_MAX - end, "}\n");
    }
    json_decref(root);
    if (ok) return plain;
    free(plain);
    return NULL;
}

struct choice {
    const char *config, *dir;
    uint64_t seed, shards;
    bool plain, bigram, force;
};

static int make(const struct choice *choice)
{
    struct eng_config config;
    struct kv_error err = {0};
    int result = EXIT_FAILURE;

    char *text = config_text(choice->config);
    if (text == NULL) return EXIT_FAILURE;
    kv_status status = eng_config_parse(choice->config, text, strlen(text), &config, &err);
    if (status == KV_OK && choice->plain) {
        char *plain = make_plain(text, &config);
        free(text);
        text = plain;
        if (text == NULL)
            status = KV_FAIL(&err, KV_NOMEM, "%s: no memory for its config", choice->config);
        else
            status = eng_config_parse(choice->config, text, strlen(text), &config, &err);
    }
    if (status != KV_OK) {
        (void)fprintf(stderr, "mkmodel: %s\n", err.text);
    } else {
        const struct plan plan = {
            .dir = choice->dir,
            .config_text = text,
            .config_bytes = strlen(text),
            .config = &config,
            .seed = choice->seed,
            .shards = (uint32_t)choice->shards,
            .bigram = choice->bigram,
            .force = choice->force,
        };
        result = write_model(&plan);
    }
    free(text);
    return result;
}

int main(int argc, char **argv)
{
    static const struct option options[] = {
        {"config", required_argument, NULL, 'c'}, {"seed", required_argument, NULL, 's'},
        {"shards", required_argument, NULL, 'n'}, {"bigram", no_argument, NULL, 'b'},
        {"plain", no_argument, NULL, 'p'},        {"force", no_argument, NULL, 'f'},
        {"help", no_argument, NULL, 'h'},         {NULL, 0, NULL, 0},
    };
    struct choice choice = {.config = "tiny", .seed = 1, .shards = 1};
    int option;

    while ((option = getopt_long(argc, argv, "", options, NULL)) != -1) {
        if (option == 'c') {
            choice.config = optarg;
        } else if (option == 's') {
            if (!read_number(optarg, 0, UINT64_MAX, &choice.seed))
                return usage_error("--seed must be a number, found ", optarg);
        } else if (option == 'n') {
            if (!read_number(optarg, 1, ENG_SHARDS_MAX, &choice.shards))
                return usage_error("--shards must be 1 to 256, found ", optarg);
        } else if (option == 'b') {
            choice.bigram = true;
        } else if (option == 'p') {
            choice.plain = true;
        } else if (option == 'f') {
            choice.force = true;
        } else if (option == 'h') {
            print_usage(stdout);
            return EXIT_SUCCESS;
        } else {
            print_usage(stderr);
            return EXIT_USAGE;
        }
    }
    if (optind < argc) choice.dir = argv[optind++];
    if (optind < argc) return usage_error("unexpected argument ", argv[optind]);
    if (choice.dir == NULL) return usage_error("the directory is missing", "");
    return make(&choice);
}
