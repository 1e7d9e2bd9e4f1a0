/* Engram row numbers: NumPy's generator, the published constants of the real model, and hashing
 * with its edges: before position 0, and image tokens. */

#include "engine/model/engram.h"
#include "kvstore/base/bytes.h"
#include "tests/harness.h"
#include "tests/unit/test_engram_vectors.h"

static const struct eng_config real_config = {
    .engram_count = 2,
    .engram_layers = {1, 14},
    .engram_max_ngram = 4,
    .engram_heads = 8,
    .engram_bucket_base = 16000000,
    .engram_compressed = 99092,
};

static void init_hashes(const struct eng_config *config, struct eng_engram_hash hashes[2])
{
    for (uint32_t i = 0; i < 2; i++)
        eng_engram_hash_init(&hashes[i], config, i);
}

static void numpy_numbers(void)
{
    for (size_t i = 0; i < KV_ARRAY_COUNT(numpy_cases); i++) {
        uint64_t values[4];
        eng_numpy_integers(numpy_cases[i].seed, numpy_cases[i].bound, 4, values);
        for (int n = 0; n < 4; n++)
            EXPECT_EQ_U64(values[n], numpy_cases[i].values[n]);
    }
}

/* The constants of the model's specification. */
static void real_constants(void)
{
    static const uint64_t multipliers[2][4] = {
        {76632096046245u, 4839876093313u, 35959672319349u, 73987337458391u},
        {67716810739261u, 51510806800915u, 30921347202721u, 82619226485591u},
    };
    static const uint64_t first[2] = {16000057, 16000477}, last[2] = {16000463, 16000889};
    static const uint64_t rows[2] = {384006168, 384016682};
    struct eng_engram_hash hashes[2];

    init_hashes(&real_config, hashes);
    for (int i = 0; i < 2; i++) {
        EXPECT_EQ_U32(hashes[i].columns, 24);
        for (int s = 0; s < 4; s++)
            EXPECT_EQ_U64(hashes[i].multipliers[s], multipliers[i][s]);
        EXPECT_EQ_U64(hashes[i].primes[0], first[i]);
        EXPECT_EQ_U64(hashes[i].primes[23], last[i]);
        EXPECT_EQ_U64(hashes[i].rows, rows[i]);
        EXPECT_EQ_U64(hashes[i].offsets[0], 0);
        EXPECT_EQ_U64(hashes[i].offsets[1], first[i]);
        EXPECT_EQ_U64(hashes[i].offsets[23], rows[i] - last[i]);
    }
}

/* The rows of the token at `position` are `want`, one per column. */
static void expect_rows(const struct eng_engram_ids *ids, const struct eng_engram_hash *hash,
                        const uint32_t *tokens, uint32_t position, const uint64_t *want)
{
    uint64_t rows[ENG_ENGRAM_COLUMNS_MAX];
    uint32_t newest_first[ENG_NGRAM_MAX], context[ENG_NGRAM_MAX];
    const uint32_t known = KV_MIN(position + 1, hash->max_ngram);
    for (uint32_t s = 0; s < known; s++)
        newest_first[s] = tokens[position - s];
    eng_engram_context(ids, newest_first, known, hash->max_ngram, context);
    eng_engram_rows(hash, context, rows);
    for (uint32_t c = 0; c < hash->columns; c++)
        EXPECT_EQ_U64(rows[c], want[c]);
}

/* As NumPy's int64 computes them from the real constants; compressed id = id mod 99,092. */
static void real_rows(void)
{
    static const uint32_t tokens[] = {0, 5, 129000, 99091, 77777, 3, 42, 129264, 11, 12, 13, 14};
    static const uint32_t positions[] = {0, 4, 8, 11};
    static const uint64_t want[2][4][24] = {
        {{5702652,   24393184,  39183301,  61503783,  78984481,  90144770,  103724983, 121476532,
          131476717, 152385926, 164143652, 191599181, 198145581, 217419202, 238329687, 247482304,
          257520185, 283540304, 288689443, 315264704, 322314652, 348890037, 367865216, 380066193},
         {5405205,   21789766,  34596948,  63868847,  74492428,  94757977,  98026487,  122770647,
          138522142, 155085993, 175243047, 180369442, 194151999, 220107380, 232869651, 250713924,
          271945960, 275463837, 290777964, 309201020, 333174362, 338670121, 362960260, 375102804},
         {5935489,   27383162,  35151319,  49297276,  78519428,  93594367,  109132061, 127360623,
          134799720, 155073145, 172023224, 182002634, 203710159, 222565368, 226849368, 246183019,
          265484878, 276664948, 293575438, 318031346, 323668452, 348124664, 353680922, 376233586},
         {3069065,   20615382,  41119898,  61156577,  67215650,  85236582,  110247393, 126891920,
          136289608, 146442462, 162921302, 191952599, 194831777, 212272831, 238435924, 248119371,
          270131135, 287543248, 303947425, 304149389, 325617925, 341820374, 353768040, 375641804}},
        {{14361964,  29977809,  32716444,  61209771,  67456205,  84275051,  108494439, 120604547,
          132225184, 150270452, 174805952, 178895254, 193207923, 211610196, 226280582, 252505246,
          261362261, 279862797, 301364059, 312864848, 328367036, 349372619, 363873742, 372375971},
         {13241720,  16859776,  44773181,  58758354,  73964114,  87796849,  106832740, 112661903,
          128197919, 154636804, 168433425, 189497745, 199439247, 215007934, 231540943, 253400585,
          265110383, 278194714, 292316475, 307616266, 321581975, 336067108, 352049823, 368064172},
         {12163276,  17383007,  46048242,  59825435,  74714445,  81500338,  103517253, 122529219,
          130800596, 145921159, 167363145, 181604282, 207448000, 215533427, 234347095, 245953124,
          266532396, 277997281, 294027042, 319183901, 326089622, 349032268, 362752184, 383349447},
         {10745769,  31406264,  40198743,  56727619,  64992125,  81094033,  107481292, 112675967,
          140740092, 157583906, 167701958, 185389049, 207292265, 214881488, 227530883, 247748307,
          265589426, 282858673, 294514095, 310938872, 333830098, 336385210, 363195569, 369240782}},
    };
    struct eng_engram_hash hashes[2];
    static uint32_t compressed[129280];
    const struct eng_engram_ids ids = {.compressed = compressed, .pad = 2, .image = 129264};

    for (uint32_t i = 0; i < 129280; i++)
        compressed[i] = i % 99092;
    init_hashes(&real_config, hashes);
    for (int layer = 0; layer < 2; layer++)
        for (int n = 0; n < 4; n++)
            expect_rows(&ids, &hashes[layer], tokens, positions[n], want[layer][n]);
}

/* The toy's table: bytes fold to lower case, every other id stays alone. */
static void tiny_ids(uint32_t compressed[512])
{
    uint32_t next = 0, number[512];
    bool seen[512] = {false};
    for (uint32_t i = 0; i < 512; i++) {
        const uint32_t key = i >= 3 + 'A' && i <= 3 + 'Z' ? i + 32 : i;
        if (!seen[key]) number[key] = next++;
        seen[key] = true;
        compressed[i] = number[key];
    }
    EXPECT_EQ_U32(next, 486);
}

/* A sequence with image tokens: alone, two in a row, and text up to four after them. */
static void tiny_rows(void)
{
    static const uint32_t tokens[] = {7, 510, 9, 100, 101, 102, 2, 510, 510, 300, 500, 68, 3, 0};
    static const uint64_t want[2][14][6] = {
        {{248, 501, 611, 1052, 1075, 1445},
         {82, 429, 614, 894, 1290, 1392},
         {240, 296, 749, 897, 1097, 1596},
         {10, 380, 641, 798, 1172, 1510},
         {70, 394, 590, 868, 1205, 1579},
         {206, 331, 634, 860, 1277, 1518},
         {197, 457, 704, 967, 1325, 1417},
         {82, 429, 614, 894, 1290, 1392},
         {82, 429, 614, 894, 1290, 1392},
         {109, 377, 742, 1056, 1069, 1435},
         {62, 333, 675, 876, 1070, 1432},
         {1, 290, 702, 829, 1100, 1568},
         {127, 295, 681, 971, 1070, 1421},
         {196, 350, 594, 827, 1283, 1359}},
        {{109, 432, 751, 998, 1296, 1550},
         {7, 295, 753, 891, 1398, 1738},
         {88, 488, 632, 910, 1256, 1713},
         {62, 539, 603, 1165, 1389, 1780},
         {3, 476, 731, 977, 1420, 1815},
         {243, 390, 781, 950, 1286, 1631},
         {211, 485, 663, 1107, 1489, 1616},
         {7, 295, 753, 891, 1398, 1738},
         {7, 295, 753, 891, 1398, 1738},
         {128, 498, 789, 911, 1449, 1782},
         {241, 379, 791, 1063, 1343, 1677},
         {149, 466, 788, 910, 1394, 1618},
         {81, 447, 683, 1026, 1418, 1614},
         {40, 519, 656, 1179, 1218, 1771}},
    };
    static const struct eng_config config = {
        .engram_count = 2,
        .engram_layers = {1, 6},
        .engram_max_ngram = 4,
        .engram_heads = 2,
        .engram_bucket_base = 257,
        .engram_compressed = 486,
    };
    struct eng_engram_hash hashes[2];
    uint32_t compressed[512];
    struct eng_engram_ids ids = {.compressed = compressed, .image = 510};

    tiny_ids(compressed);
    ids.pad = compressed[2];
    init_hashes(&config, hashes);
    EXPECT_EQ_U32(hashes[0].columns, 6);
    EXPECT_EQ_U64(hashes[0].primes[0], 257);
    EXPECT_EQ_U64(hashes[0].primes[1], 263);
    for (int layer = 0; layer < 2; layer++)
        for (uint32_t p = 0; p < 14; p++)
            expect_rows(&ids, &hashes[layer], tokens, p, want[layer][p]);
}

int main(void)
{
    numpy_numbers();
    real_constants();
    real_rows();
    tiny_rows();
    HARNESS_END();
}
