// dlopen and dlmopen for x86-64: see dynamic_loading.hpp.
.text

.globl dlopen
.type dlopen, @function
dlopen:
  push %rdi
  push %rsi
  sub $8, %rsp
  call sluice_names_driver
  add $8, %rsp
  pop %rsi
  pop %rdi
  test %eax, %eax
  jnz sluice_open_itself
  jmp *sluice_next_dlopen(%rip)
.size dlopen, .-dlopen

.globl dlmopen
.type dlmopen, @function
dlmopen:
  push %rdi
  push %rsi
  push %rdx
  mov %rsi, %rdi
  call sluice_names_driver
  pop %rdx
  pop %rsi
  pop %rdi
  test %eax, %eax
  jz 1f
  mov %rsi, %rdi
  mov %edx, %esi
  jmp sluice_open_itself
1:
  jmp *sluice_next_dlmopen(%rip)
.size dlmopen, .-dlmopen

.section .note.GNU-stack,"",@progbits
