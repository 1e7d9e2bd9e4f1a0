#pragma once

/*
 * Planted bugs (kvstore/base/plant.h) for a store on the disks of these tests.  Those of the store
 * itself are compiled into iofail and crashimage; those of a disk are played by a wrapper; those of
 * an acknowledgement by work.c, which is the one that gives them here.
 * Owned by: the thread that runs the disk.
 */

#include "kvstore/base/disk.h"
#include "kvstore/base/plant.h"

/* False: no such name.  "none" is one. */
bool plant_find(const char *name, enum kv_plant *ret_plant);
const char *plant_name(enum kv_plant plant);

/* The bug of all stores that are opened from here on. */
void plant_set(enum kv_plant plant);
enum kv_plant plant_now(void);

/* Owns nothing but itself. */
struct kv_disk *plant_disk(struct kv_disk *inner);
