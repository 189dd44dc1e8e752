#include "entropy.h"

#include <stdlib.h>
#include <string.h>

#include "jpeg.h"

/* The head of libjpeg's own entropy decoder, as all versions since 6b have it (jpegint.h). */
struct jpeg_entropy_decoder {
    void (*start_pass)(j_decompress_ptr info);
    boolean (*decode_mcu)(j_decompress_ptr info, JBLOCKROW *blocks);
};

static const uint8_t ZIGZAG[64] = {0,  1,  8,  16, 9,  2,  3,  10, 17, 24, 32, 25, 18, 11, 4,  5,  12, 19, 26, 33, 40, 48,
                                   41, 34, 27, 20, 13, 6,  7,  14, 21, 28, 35, 42, 49, 56, 57, 50, 43, 36, 29, 22, 15, 23,
                                   30, 37, 44, 51, 58, 59, 52, 45, 38, 31, 39, 46, 53, 60, 61, 54, 47, 55, 62, 63};

/* An entry of HuffmanTable.look: bits to consume in the low byte (0: the code is longer than LOOK_BITS), then 4 bits
   how many zeros come before, 4 bits how many bits of the value are still to be read, and the value if none are. */
#define ENTRY(consumed, run, left, value) ((int32_t)((uint32_t)(value) << 16 | (uint32_t)((left) << 12 | (run) << 8 | (consumed))))
#define CONSUMED(entry) ((entry)&255)
#define RUN(entry) ((entry) >> 8 & 15)
#define LEFT(entry) ((entry) >> 12 & 15)
#define VALUE(entry) ((entry) >> 16)

/* Numbers of `size` bits: those that start with 0 are negative. */
static inline int32_t signed_value(int32_t raw, int size) {
    return raw < 1 << (size - 1) ? raw - (1 << size) + 1 : raw;
}

static int32_t make_entry(int symbol, int length, int rest_bits, int rest, int is_ac) {
    int run = is_ac ? symbol >> 4 : 0, size = symbol & 15;
    if (size == 0)
        return ENTRY(length, run, 0, 0);
    if (size > rest_bits)
        return ENTRY(length, run, size, 0);
    return ENTRY(length + size, run, 0, signed_value(rest >> (rest_bits - size), size));
}

/* 0 when the table makes no sense. */
static int make_table(HuffmanTable *table, const JHUFF_TBL *source, int is_ac) {
    int32_t code = 0;
    int place = 0;
    if (!source)
        return 0;
    if (table->made && !memcmp(table->bits, source->bits, sizeof table->bits) &&
        !memcmp(table->values, source->huffval, sizeof table->values))
        return 1;
    table->made = 0;
    memset(table->look, 0, sizeof table->look);
    for (int length = 1; length <= 16; length++) {
        table->offset[length] = place - code;
        for (int i = 0; i < source->bits[length]; i++, code++, place++) {
            if (place >= 256 || code >= 1 << length || (!is_ac && source->huffval[place] > 15))
                return 0;
            if (length <= LOOK_BITS) {
                int rest_bits = LOOK_BITS - length;
                for (int rest = 0; rest < 1 << rest_bits; rest++)
                    table->look[code << rest_bits | rest] =
                        make_entry(source->huffval[place], length, rest_bits, rest, is_ac);
            }
        }
        table->end_code[length] = code << (16 - length);
        code <<= 1;
    }
    table->end_code[17] = INT32_MAX;
    memcpy(table->bits, source->bits, sizeof table->bits);
    memcpy(table->values, source->huffval, sizeof table->values);
    table->made = 1;
    return 1;
}

/* What changes with every symbol, kept in registers while a block is read. */
typedef struct {
    uint64_t bits;
    const uint8_t *at;
    int num_bits;
} Cursor;

/* One byte at a time, without the zeros stuffed behind 0xFF; at a marker or the end, zeros. */
static Cursor refill_slowly(EntropyReader *reader, Cursor cursor) {
    while (cursor.num_bits <= 56) {
        uint64_t byte = 0;
        if (cursor.at < reader->end && *cursor.at != 0xFF) {
            byte = *cursor.at++;
        } else if (reader->end - cursor.at >= 2 && cursor.at[1] == 0) {
            byte = 0xFF;
            cursor.at += 2;
        } else {
            reader->num_missing += 8;
        }
        cursor.bits |= byte << (56 - cursor.num_bits);
        cursor.num_bits += 8;
    }
    return cursor;
}

/* At least 32 bits: enough for any symbol and its value. */
static inline void refill(EntropyReader *reader, Cursor *cursor) {
    if (cursor->num_bits >= 32)
        return;
    if (reader->end - cursor->at >= 4) {
        const uint8_t *at = cursor->at;
        uint32_t four = (uint32_t)at[0] << 24 | (uint32_t)at[1] << 16 | (uint32_t)at[2] << 8 | at[3];
        if (!((~four - 0x01010101u) & four & 0x80808080u)) { /* no byte is 0xFF */
            cursor->bits |= (uint64_t)four << (32 - cursor->num_bits);
            cursor->num_bits += 32;
            cursor->at += 4;
            return;
        }
    }
    *cursor = refill_slowly(reader, *cursor);
}

static inline void consume(Cursor *cursor, int num_bits) {
    cursor->bits <<= num_bits;
    cursor->num_bits -= num_bits;
}

static int32_t long_symbol(EntropyReader *reader, const HuffmanTable *table, uint64_t bits, int is_ac) {
    int32_t code = (int32_t)(bits >> 48);
    int length = LOOK_BITS + 1;
    while (code >= table->end_code[length])
        length++;
    if (length > 16) {
        reader->failed = 1;
        return ENTRY(1, 0, 0, 0); /* the end of the block */
    }
    return make_entry(table->values[((code >> (16 - length)) + table->offset[length]) & 255], length, 0, 0, is_ac);
}

/* The entry of the next symbol, consumed but for the value's bits that are LEFT. */
static inline int32_t next_symbol(EntropyReader *reader, Cursor *cursor, const HuffmanTable *table, int is_ac) {
    refill(reader, cursor);
    int32_t entry = table->look[cursor->bits >> (64 - LOOK_BITS)];
    if (CONSUMED(entry) == 0)
        entry = long_symbol(reader, table, cursor->bits, is_ac);
    consume(cursor, CONSUMED(entry));
    return entry;
}

static inline int32_t read_value(Cursor *cursor, int size) {
    int32_t raw = (int32_t)(cursor->bits >> (64 - size));
    consume(cursor, size);
    return signed_value(raw, size);
}

/* One block: to `block` (zeros before), or past it. `block` is a constant NULL where this is inlined for skipping. */
static inline void read_block(EntropyReader *reader, const HuffmanTable *dc, const HuffmanTable *ac, int *last_dc,
                              JCOEF *block) {
    Cursor cursor = {reader->bits, reader->at, reader->num_bits};
    int32_t entry = next_symbol(reader, &cursor, dc, 0);
    *last_dc += LEFT(entry) ? read_value(&cursor, LEFT(entry)) : VALUE(entry);
    if (block)
        block[0] = (JCOEF)*last_dc;
    int k = 1;
    while (k < DCTSIZE2) {
        entry = next_symbol(reader, &cursor, ac, 1);
        int32_t value = VALUE(entry);
        k += RUN(entry);
        if (value == 0) {
            if (LEFT(entry)) {
                value = read_value(&cursor, LEFT(entry));
            } else if (RUN(entry) == 15) { /* 16 zeros */
                k++;
                continue;
            } else {
                reader->failed |= RUN(entry) != 0;
                break; /* the rest is zeros */
            }
        }
        if (k >= DCTSIZE2) {
            reader->failed = 1;
            break;
        }
        if (block)
            block[ZIGZAG[k]] = (JCOEF)value;
        k++;
    }
    reader->bits = cursor.bits;
    reader->at = cursor.at;
    reader->num_bits = cursor.num_bits;
}

static void start_segment(EntropyReader *reader, const uint8_t *at) {
    reader->at = at;
    reader->bits = 0;
    reader->num_bits = reader->num_missing = 0;
    reader->until_restart = reader->interval;
    memset(reader->last_dc, 0, sizeof reader->last_dc);
}

/* Past the marker that must come now, with nothing but the last byte's padding before it. */
static void restart(EntropyReader *reader, unsigned number) {
    if (reader->num_bits - reader->num_missing >= 8 || reader->end - reader->at < 2 || reader->at[0] != 0xFF ||
        reader->at[1] != JPEG_RST0 + number % 8)
        reader->failed = 1;
    else
        start_segment(reader, reader->at + 2);
}

static void read_mcu(j_decompress_ptr info, EntropyReader *reader, JBLOCKROW *blocks) {
    for (int i = 0; i < info->blocks_in_MCU; i++) {
        int place = info->MCU_membership[i];
        const jpeg_component_info *component = info->cur_comp_info[place];
        const HuffmanTable *dc = &reader->dc[component->dc_tbl_no], *ac = &reader->ac[component->ac_tbl_no];
        if (blocks)
            read_block(reader, dc, ac, &reader->last_dc[place], blocks[i][0]);
        else
            read_block(reader, dc, ac, &reader->last_dc[place], NULL);
        if (abs(reader->last_dc[place]) > 32767)
            reader->failed = 1;
    }
    if (reader->num_missing > reader->num_bits) /* bits were used that are not there */
        reader->failed = 1;
}

/* libjpeg calls this for MCU after MCU; `blocks` is NULL for rows that it skips. After a failure the image does not
   matter any more. */
static boolean decode_mcu(j_decompress_ptr info, JBLOCKROW *blocks) {
    EntropyReader *reader = info->client_data;
    unsigned row = reader->row, column = reader->column;
    int wanted = blocks && column >= reader->first_column && column < reader->end_column;
    if (++reader->column == info->MCUs_per_row) {
        reader->column = 0;
        reader->row++;
    }
    if (reader->failed)
        return TRUE;
    if (reader->num_tile_rows) {
        if (!wanted)
            return TRUE;
        if (row >= reader->num_tile_rows)
            reader->failed = 1;
        else if (column % reader->interval == 0)
            start_segment(reader, reader->start + reader->tiles[row * reader->tiles_a_row + column / reader->interval]);
    } else if (reader->interval) {
        if (reader->until_restart == 0)
            restart(reader, (row * info->MCUs_per_row + column) / reader->interval - 1);
        reader->until_restart--;
    }
    if (!reader->failed)
        read_mcu(info, reader, wanted ? blocks : NULL);
    return TRUE;
}

/* The offset of the next marker, or `length`. Coded data has no 0xFF without a 0 behind it. */
static size_t next_marker(const uint8_t *data, size_t length, size_t at) {
    while (at < length) {
        const uint8_t *found = memchr(data + at, 0xFF, length - at);
        if (!found || (size_t)(found - data) + 1 >= length)
            return length;
        at = (size_t)(found - data);
        if (found[1] != 0)
            return at;
        at += 2;
    }
    return length;
}

/* Finds where the tiles of the rows before `end_row` start, if every row begins with a restart. Scanning takes
   microseconds; an index of all tiles of all images would be gigabytes. */
static void find_tiles(j_decompress_ptr info, EntropyReader *reader, unsigned end_row) {
    size_t length = (size_t)(reader->end - reader->start), at = 0, count;
    if (!reader->interval || info->MCUs_per_row % reader->interval || length > UINT32_MAX)
        return;
    if (end_row > info->MCU_rows_in_scan)
        end_row = info->MCU_rows_in_scan;
    reader->tiles_a_row = info->MCUs_per_row / reader->interval;
    count = (size_t)end_row * reader->tiles_a_row;
    if (count > length / 2 + 1 ||
        reserve((void **)&reader->tiles, &reader->tiles_room, count * sizeof *reader->tiles))
        return;
    for (size_t i = 0; i < count; i++) {
        reader->tiles[i] = (uint32_t)at;
        if (i + 1 == count)
            break;
        at = next_marker(reader->start, length, at);
        if (at + 2 > length || reader->start[at + 1] != JPEG_RST0 + i % 8)
            return;
        at += 2;
    }
    reader->num_tile_rows = end_row;
    reader->first_column -= reader->first_column % reader->interval; /* a tile is read from its start */
}

static int make_tables(j_decompress_ptr info, EntropyReader *reader) {
    for (int i = 0; i < info->comps_in_scan; i++) {
        int dc = info->cur_comp_info[i]->dc_tbl_no, ac = info->cur_comp_info[i]->ac_tbl_no;
        if (dc < 0 || dc >= NUM_HUFF_TBLS || ac < 0 || ac >= NUM_HUFF_TBLS ||
            !make_table(&reader->dc[dc], info->dc_huff_tbl_ptrs[dc], 0) ||
            !make_table(&reader->ac[ac], info->ac_huff_tbl_ptrs[ac], 1))
            return 0;
    }
    return 1;
}

void take_over(j_decompress_ptr info, EntropyReader *reader, const uint8_t *data, size_t length, unsigned first_column,
               unsigned end_column, unsigned end_row) {
    /* At the end of its input libjpeg's source leads into bytes of its own; the addresses need not compare. */
    uintptr_t place = (uintptr_t)info->src->next_input_byte, low = (uintptr_t)data;
    reader->failed = 0;
    reader->row = reader->column = reader->num_tile_rows = 0;
    if (place < low || place - low > length || info->progressive_mode || info->arith_code ||
        jpeg_has_multiple_scans(info) || info->comps_in_scan != info->num_components || info->Ss != 0 ||
        info->Se != DCTSIZE2 - 1 || !make_tables(info, reader))
        return;
    reader->start = info->src->next_input_byte;
    reader->end = data + length;
    reader->first_column = first_column;
    reader->end_column = end_column;
    reader->interval = info->restart_interval;
    start_segment(reader, reader->start);
    find_tiles(info, reader, end_row);
    info->entropy->decode_mcu = decode_mcu;
}

void free_reader(EntropyReader *reader) {
    free(reader->tiles);
    memset(reader, 0, sizeof *reader);
}
