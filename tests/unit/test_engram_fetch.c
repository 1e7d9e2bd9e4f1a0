/* Rows come out of a mapped file as they lie there, table by table, pass by pass. */

#include "engine/model/engram_fetch.h"
#include "engine/model/quant.h"
#include "tests/harness.h"

#include <sys/mman.h>
#include <unistd.h>

enum { TABLES = 3, ROWS = 1000, DIM = 64, ROW_BYTES = DIM + DIM / 32, MAX = 1000 };

static uint8_t byte_at(uint32_t table, uint64_t row, uint32_t i)
{
    return (uint8_t)((table * 31 + row * 7 + i * 3) % 251);
}

/* A file with the tables at odd offsets, as a safetensors file may have them. */
static uint8_t *map_file(struct eng_engram_table tables[TABLES], size_t *ret_bytes)
{
    char path[] = "/tmp/engram-fetch-XXXXXX";
    const size_t bytes = 9 + (size_t)TABLES * ROWS * ROW_BYTES;
    uint8_t *data = calloc(1, bytes);
    const int fd = mkstemp(path);
    EXPECT(fd >= 0 && data != NULL);
    (void)unlink(path);
    for (uint32_t t = 0; t < TABLES; t++) {
        uint8_t *codes = data + 9 + (size_t)t * ROWS * ROW_BYTES;
        for (uint64_t row = 0; row < ROWS; row++)
            for (uint32_t i = 0; i < ROW_BYTES; i++) {
                uint8_t *at = i < DIM ? codes + row * DIM + i
                                      : codes + ROWS * DIM + row * (DIM / 32) + (i - DIM);
                *at = byte_at(t, row, i);
            }
    }
    EXPECT(write(fd, data, bytes) == (ssize_t)bytes);
    free(data);
    uint8_t *map = mmap(NULL, bytes, PROT_READ, MAP_PRIVATE, fd, 0);
    EXPECT(map != MAP_FAILED);
    (void)close(fd);
    for (uint32_t t = 0; t < TABLES; t++) {
        const uint8_t *codes = map + 9 + (size_t)t * ROWS * ROW_BYTES;
        tables[t] = (struct eng_engram_table){
            .codes = codes, .scales = codes + ROWS * DIM, .rows = ROWS, .dim = DIM};
        eng_engram_table_advise(&tables[t]);
    }
    *ret_bytes = bytes;
    return map;
}

static void run_pass(struct eng_fetch *fetch, uint32_t first, uint32_t end, uint32_t count,
                     uint64_t *seed)
{
    static uint64_t numbers[TABLES][MAX];
    for (uint32_t t = first; t < end; t++)
        for (uint32_t i = 0; i < count; i++) {
            *seed = *seed * 6364136223846793005u + 1442695040888963407u;
            numbers[t][i] = i == 0 ? 0 : i == 1 ? ROWS - 1 : (*seed >> 33) % ROWS;
            eng_fetch_numbers(fetch, t)[i] = numbers[t][i];
        }
    eng_fetch_start(fetch, first, end, count);
    for (uint32_t t = first; t < end; t++) {
        const uint8_t *rows = eng_fetch_wait(fetch, t);
        for (uint32_t i = 0; i < count; i++) {
            uint32_t wrong = 0;
            for (uint32_t b = 0; b < ROW_BYTES; b++)
                wrong += rows[i * ROW_BYTES + b] != byte_at(t, numbers[t][i], b);
            EXPECT_EQ_U32(wrong, 0);
        }
    }
}

int main(void)
{
    struct eng_engram_table tables[TABLES];
    struct eng_fetch *fetch = NULL;
    uint64_t seed = 1, total = 0;
    size_t bytes = 0;
    uint8_t *map = map_file(tables, &bytes);

    EXPECT(eng_fetch_create(tables, TABLES, MAX, eng_fetch_resident_bytes(), &fetch, NULL) ==
           KV_OK);
    eng_fetch_destroy(fetch); /* Without a pass. */
    /* As tables that lie on disk, then as ones that stay in memory. */
    for (int cold = 1; cold >= 0; cold--) {
        total = 0;
        EXPECT(eng_fetch_create(tables, TABLES, MAX, cold ? 0 : bytes, &fetch, NULL) == KV_OK);
        for (uint32_t pass = 0; pass < 300; pass++) {
            const uint32_t first = pass % TABLES, end = first + 1 + pass % (TABLES - first);
            const uint32_t count = pass % 5 == 0 ? MAX : 1 + pass % 17;
            run_pass(fetch, first, end, count, &seed);
            total += (uint64_t)count * (end - first);
            EXPECT_EQ_U64(eng_fetch_rows(fetch), total);
        }
        eng_fetch_destroy(fetch);
    }
    eng_fetch_destroy(NULL);
    (void)munmap(map, bytes);
    HARNESS_END();
}
