/*
 * Where the ranks of a job stop, so that none of them has launched a collective that another never will
 * (docs/collectives.md): the ranks' submitters, what pauses each of them, their devices.
 *
 * Collectives are numbered alike on all ranks. A rank arrives at a number when all before it is with its device; the number
 * is granted when all ranks have arrived; what is granted must be launched. One word holds the epoch, who pauses, and how
 * much is granted, and changes in one step. A pause ends the grants: the cut is where they stand. It may also begin an
 * epoch: then what has not been granted is dropped on every rank, back to the last commit, and is run again. A commit has a
 * number too, and nothing to launch.
 *
 * While no rank needs that, nobody waits for grants; whoever is the first to need it grants up to where the farthest has
 * arrived, and pauses when its rank is as far. Who needs it arrives when that has been done.
 *
 *   -DDEATH        a rank may be killed at any instant
 *   -DFREE         ranks need it only while they pause, and begin no epochs
 *   -DJOIN         ranks begin to need it one by one, before their first calls, and pause without a look at what they owe
 *   -DTRACE        for a simulation: prints each step that is one call of the code's, which cut_trace makes after it
 *   Each of these takes something away, and something must then be found wrong:
 *   -DNO_WORD      a grant does not look at who pauses in the same step
 *   -DNO_DEBT      a rank pauses without launching what is granted
 *   -DNO_EPOCH     an arrival does not say of which epoch it is
 *   -DNO_COMMIT    a rank commits without a number
 *   -DNO_RETRY     whoever resumes does not look whether something can be granted
 *   -DNO_CATCH_UP  (with FREE) the first that needs it leaves the grants where they were
 *   -DARRIVE_FIRST (with JOIN) a rank that needs it arrives while another catches up
 *   -DLOOK_FIRST   (with FREE) a rank looks whether anybody needs it before it says where it has arrived
 */
#ifndef RANKS
#define RANKS 2
#endif
#ifndef BATCHES
#define BATCHES 2
#endif
#ifndef INSIDE
#define INSIDE 1  /* collectives in a micro-batch */
#endif
#ifndef PAUSERS
#define PAUSERS RANKS  /* ranks that are paused */
#endif
#ifndef PAUSES
#define PAUSES 1  /* of each of them */
#endif
#define ITEMS (INSIDE + 1)
#define MOST (BATCHES * ITEMS + PAUSERS * PAUSES * INSIDE + 2)

#ifdef TRACE
#define CALL atomic {
#define END }
#define TELL(line, of, more) ; printf(line, of, more, epoch, granted, pausing, NEEDED)
#ifdef FREE
#define NEEDED needed
#else
#define NEEDED RANKS
#endif
#else
#define CALL
#define END
#define TELL(line, of, more)
#endif

/* The word. */
byte epoch, granted, pausing;
#if defined(FREE) || defined(JOIN)
byte needed;
bit catching_up, needs[RANKS];
#define ASKED (needed > 0 && !catching_up)
#else
#define ASKED true
#endif
/* Of each rank: what it has arrived at, and launched or committed. */
byte arrived[RANKS], arrived_in[RANKS], launched[RANKS], committed[RANKS];
byte running[RANKS];      /* collectives on its device; they end together */
bit closed[RANKS];        /* its gate */
bit dead, ended[RANKS];
#ifdef JOIN
bit joined[RANKS];
#endif
byte work[MOST];          /* what the first rank to launch a number has launched: micro-batch and item, from 1 */

inline all_arrived(at) {
  ok = 1;
  i = 0;
  do
  :: i < RANKS ->
     if
#ifdef NO_EPOCH
     :: arrived[i] < at -> ok = 0
#else
     :: arrived[i] < at || arrived_in[i] != epoch -> ok = 0
#endif
     :: else
     fi;
     i++
  :: i == RANKS -> break
  od
}

/* Whoever finds that all have arrived moves the word on. */
inline try_to_grant() {
  atomic {
    do
    :: all_arrived(granted + 1);
       if
#ifdef NO_WORD
       :: ok -> granted++
#else
       :: ok && pausing == 0 && ASKED -> granted++
       :: ok && !(pausing == 0 && ASKED) -> break
#endif
       :: !ok -> break
       fi
    od;
    ok = 0; i = 0
  }
}

/* The first that needs it grants what may have been launched. */
inline need_it() {
  atomic {
    first = needed == 0;
    catching_up = catching_up || first;
    needs[r] = 1;
    needed++
  };
  if
  :: first ->
     farthest = 0;
     i = 0;
     do
     :: i < RANKS ->
        if
        :: arrived[i] > farthest -> farthest = arrived[i]
        :: else
        fi;
        i++
     :: i == RANKS -> break
     od;
     atomic {
       i = 0;
#ifndef NO_CATCH_UP
       granted = (farthest > granted -> farthest : granted);
#endif
       catching_up = 0
     };
     try_to_grant()
  :: else
  fi
}

proctype rank(byte r) {
  byte number, known, batch, item, i;
  bit ok, free;
#ifdef JOIN
  byte farthest;
  bit first;
  need_it();
  joined[r] = 1;
#endif
  do
  :: batch == BATCHES -> break
  :: batch < BATCHES ->
     if
#ifdef NO_COMMIT
     :: item == INSIDE ->
        atomic {
          if
          :: epoch == known -> committed[r]++; batch++
          :: else -> known = epoch
          fi;
          item = 0
        }
     :: item < INSIDE ->
#else
     :: item < ITEMS ->
#endif
        number = number + 1;
#ifdef LOOK_FIRST
        free = needed == 0;
#endif
#if (defined(FREE) || defined(JOIN)) && !defined(ARRIVE_FIRST)
        if
        :: !(needs[r] && catching_up)
        :: dead -> goto over
        fi;
#endif
        CALL
        atomic { arrived[r] = number; arrived_in[r] = known };
        try_to_grant() TELL("@ arrive %d %d %d %d %d %d\n", r, batch * ITEMS + item + 1)
        END;
        do
#ifdef FREE
#ifdef TRACE
        :: atomic { !free && needed == 0 -> free = 1 TELL("@ free %d %d %d %d %d %d\n", r, 0) }
#else
#ifndef LOOK_FIRST
        :: !free && needed == 0 -> free = 1
#endif
#endif
#endif
        :: atomic { (granted >= number || free) && !closed[r] ->
             free = 0;
             launched[r] = number;
             if
             :: work[number] == 0 -> work[number] = batch * ITEMS + item + 1
             :: else -> assert(work[number] == batch * ITEMS + item + 1)
             fi;
             if
             :: item < INSIDE -> running[r]++; item++
             :: item == INSIDE -> committed[r]++; batch++; item = 0
             fi TELL("@ launch %d %d %d %d %d %d\n", r, number)
           };
           break
        :: atomic { granted < number && epoch != known && !closed[r] ->
             known = epoch; number = number - 1; item = 0 TELL("@ drop %d %d %d %d %d %d\n", r, 0)
           };
           break
        :: dead -> goto over
        od
     fi
  od;
over:
  ended[r] = 1
}

proctype pauser(byte r) {
  byte n, cut, i;
  bit ok;
#ifdef FREE
  byte farthest;
  bit first;
#endif
#ifdef JOIN
  joined[r] || dead;
#endif
  do
  :: n == PAUSES || dead -> break
  :: n < PAUSES ->
     n++;
#ifdef FREE
     CALL
     need_it() TELL("@ need %d %d %d %d %d %d\n", r, 0)
     END;
#ifdef TRACE  /* asked again and again, not waited for */
     atomic { !catching_up && launched[r] >= granted -> cut = granted TELL("@ resolve %d %d %d %d %d %d\n", r, 0) };
#else
     atomic { !catching_up || dead; cut = granted };
     launched[r] >= cut || dead;
#endif
     atomic { pausing++; cut = granted TELL("@ pause %d %d %d %d %d %d\n", r, 0) };
#else
     if
     :: atomic { pausing++; cut = granted TELL("@ pause %d %d %d %d %d %d\n", r, 0) }
     :: atomic { pausing++; cut = granted; epoch++ TELL("@ pause %d %d %d %d %d %d\n", r, 1) }
     fi;
#endif
#ifdef JOIN
     assert(dead || arrived[r] >= cut);  /* so that its gate finds what is owed inside */
#endif
#ifndef NO_DEBT
     launched[r] >= cut || dead;
#endif
     closed[r] = 1 TELL("@ rest %d %d %d %d %d %d\n", r, cut);
     running[r] == 0 || dead;
     assert(dead || launched[r] == cut);  /* nothing beyond it, and nothing owed */
     closed[r] = 0;
     CALL
     pausing--
#ifndef NO_RETRY
     ; try_to_grant()
#endif
     TELL("@ resume %d %d %d %d %d %d\n", r, 0)
     END
#ifdef FREE
     ; CALL atomic { needs[r] = 0; needed-- } TELL("@ unneed %d %d %d %d %d %d\n", r, 0) END
#endif
  od
}

/* A collective ends when it runs everywhere. */
proctype devices() {
  byte i;
end:
  do
  :: atomic {
       (running[0] > 0 && running[1] > 0
#if RANKS > 2
        && running[2] > 0
#endif
       ) ->
       i = 0;
       do
       :: i < RANKS -> running[i]--; i++
       :: i == RANKS -> break
       od;
       i = 0
     }
  :: dead -> break
  od
}

#ifdef DEATH
proctype killer() {
  dead = 1
}
#endif

init {
  byte i;
  atomic {
    do
    :: i < RANKS ->
       run rank(i);
       if
       :: i < PAUSERS -> run pauser(i)
       :: else
       fi;
       i++
    :: i == RANKS -> break
    od;
    run devices();
#ifdef DEATH
    run killer()
#endif
  }
  i = 0;
  do
  :: i < RANKS -> ended[i]; assert(dead || committed[i] == BATCHES); i++
  :: i == RANKS -> break
  od
}
