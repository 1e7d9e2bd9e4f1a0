/* Everything between a store and its disk. */

#include "tests/seam/stack.h"

#include "tests/seam/mem_disk.h"
#include "tests/seam/mem_manifest.h"

void stack_init(struct stack *stack, enum kv_plant plant, struct kv_disk *memory)
{
    *stack = (struct stack){.recorder = recorder_create(), .memory = memory};
    plant_set(plant);
    struct mem_disk_file file;
    for (uint32_t i = 0; mem_disk_file(memory, i, &file); i++)
        recorder_found(stack->recorder, file.dir, file.name, file.bytes, file.size);
    stack->failing = faulty_disk(&stack->faulty, stack->memory);
    stack->recording = recorder_disk(stack->recorder, stack->failing);
    stack->disk = plant_disk(stack->recording);
    stack->records = mem_manifest_create();
    stack->recording_records = recorder_manifest(stack->recorder, stack->records);
    stack->manifest = faulty_manifest(&stack->faulty, stack->recording_records);
}

void stack_fini(struct stack *stack)
{
    kv_manifest_close(stack->manifest);
    kv_manifest_close(stack->recording_records);
    kv_manifest_close(stack->records);
    kv_disk_destroy(stack->disk);
    kv_disk_destroy(stack->recording);
    kv_disk_destroy(stack->failing);
    kv_disk_destroy(stack->memory);
    faulty_fini(&stack->faulty);
    recorder_destroy(stack->recorder);
}
