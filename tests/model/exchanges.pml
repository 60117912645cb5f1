/*
 * Sends and receives of ranks that may be paused (docs/collectives.md): what each rank says on the board, who is let go,
 * and what a pause finds.
 *
 * A rank's program is a list of parts. A part is done on the device only when certain parts of other ranks have been
 * launched, and it is launched when those have been, or when its rank is let go: ranks that wait for each other, and for
 * nobody else, are let go together. A rank that is to pause takes back that it waits, and finds whether it has been let go.
 * Programs are made of rounds, chosen by chance: two ranks, all in a ring, all to one; and collectives of two ranks, which
 * are not let go here, and whose pauses are not looked at (cut.pml does that), but which ranks wait in.
 *
 *   -DCROSS     two ranks send to each other before they receive: this must end, though a pause may have to wait
 *   Each of these takes something away, and something must then be found wrong:
 *   -DNO_VERSION  whoever ceases to wait does not let the version grow
 *   -DNO_DEBT     a rank that pauses does not look whether it has been let go
 *   -DNO_MUTUAL   a rank is let go when all that it waits for wait, for whomever
 *   -DNO_PROGRESS what stands on the board counts also when those waited for have done their part since
 *   -DONE_BY_ONE  (with CROSS) a rank is let go only when those that it waits for have come to their part
 */
#ifndef RANKS
#define RANKS 3
#endif
#ifndef ROUNDS
#define ROUNDS 2
#endif
#ifndef PAUSERS
#define PAUSERS 1
#endif
#ifdef CROSS
#define PARTS (ROUNDS + 2)
#else
#define PARTS ROUNDS
#endif
#define AT(r, k, p) ((r) * PARTS * RANKS + (k) * RANKS + (p))
#define BIT(r) (1 << (r))

byte needs[RANKS * PARTS * RANKS];  /* of a rank's part and another rank: 1 + that one's part which it needs */
byte parts[RANKS];                  /* how many a rank has */
byte made[RANKS];                   /* how many it has launched; collectives: has come to */
bit collective[RANKS * PARTS];      /* which of them the cut lets go, when all have come to it */

/* The board: the word, and what stands at each place. The version is whether it has grown since a rank looked. */
byte let_go;
bit grown[RANKS];
byte waits_for[RANKS], seen_progress[RANKS];
bit waiting[RANKS], in_collective[RANKS];
byte progress[RANKS];

bit closing[RANKS], inside[RANKS];
bit news[RANKS];  /* so that who waits looks again only when there is something new */

inline tell() {
  d_step {
    news[0] = 1; news[1] = 1; news[RANKS - 1] = 1
  }
}
/* Says for whom a rank waits in that part, if that is the same before and after it has seen how far they are. */
inline say(r, part, by_cut) {
  sum_progress(missing, sum);
  find_missing(r, part, again);
  d_step {
    if
    :: missing == again ->
       if
       :: !waiting[r] || waits_for[r] != missing || seen_progress[r] != sum ->
          waiting[r] = 1; in_collective[r] = by_cut; waits_for[r] = missing; seen_progress[r] = sum;
          i = news[r]; tell(); news[r] = i; i = 0
       :: else
       fi;
       shown = 1
    :: else
    fi;
    missing = 0; again = 0; sum = 0
  }
}

inline grow() {
  d_step {
    grown[0] = 1; grown[1] = 1; grown[RANKS - 1] = 1
  }
}

/* The ranks that have not launched what the next part of one needs. */
inline find_missing(r, part, into) {
  d_step {
    into = 0;
    i = 0;
    do
    :: i < RANKS ->
       if
       :: needs[AT(r, part, i)] > made[i] -> into = into | BIT(i)
       :: else
       fi;
       i++
    :: i == RANKS -> break
    od;
    i = 0
  }
}

inline sum_progress(those, into) {
  into = 0;
  i = 0;
  do
  :: i < RANKS ->
     if
     :: (those & BIT(i)) != 0 -> into = into + progress[i]
     :: else
     fi;
     i++
  :: i == RANKS -> break
  od;
  i = 0
}

/* No rank that is paused is needed by what somebody has launched. */
inline nobody_waits_for_the_paused() {
  i = 0;
  do
  :: i < RANKS ->
     if
     :: closing[i] && !inside[i] ->
        j = 0;
        do
        :: j < RANKS ->
           k = 0;
           do
           :: k < made[j] ->
              assert(collective[j * PARTS + k] || needs[AT(j, k, i)] <= made[i]);
              k++
           :: k == made[j] -> break
           od;
           j++
        :: j == RANKS -> break
        od
     :: else
     fi;
     i++
  :: i == RANKS -> break
  od;
  i = 0; j = 0; k = 0
}

proctype rank(byte r) {
  byte i, j, k, missing, again, sum, seen_let_go, all, looked, to_this, before;
  byte theirs[RANKS];
  bit free, shown;
  do
  :: made[r] == parts[r] -> break
  :: made[r] < parts[r] && collective[r * PARTS + made[r]] ->
     atomic { !closing[r] -> made[r]++; tell() };
     atomic { progress[r]++; tell() };
     do
     :: news[r] = 0;
        find_missing(r, made[r] - 1, missing);
        if
        :: missing == 0 -> break
        :: else -> say(r, made[r] - 1, 1); news[r]
        fi
     od;
     atomic { waiting[r] = 0; shown = 0; tell() };
#ifndef NO_VERSION
     grow()
#endif
  :: made[r] < parts[r] && !collective[r * PARTS + made[r]] ->
     atomic { !closing[r] -> inside[r] = 1 };
     do
     :: free -> break
     :: !free && closing[r] ->
        atomic { waiting[r] = 0; shown = 0; tell() };
        atomic {
#ifndef NO_VERSION
          grow();
#endif
          tell();
#ifndef NO_DEBT
          free = (let_go & BIT(r)) != 0
#endif
        };
        find_missing(r, made[r], missing);
        if
        :: free || missing == 0 -> free = 1
        :: else ->
           inside[r] = 0;
           atomic { !closing[r] -> inside[r] = 1 }
        fi;
        missing = 0
     :: !free && !closing[r] ->
        news[r] = 0;
        find_missing(r, made[r], missing);
        if
        :: missing == 0 -> free = 1
        :: else ->
           say(r, made[r], 0);
           /* lets go */
           d_step { seen_let_go = let_go; grown[r] = 0 };
           if
           :: !shown
           :: shown && (seen_let_go & BIT(r)) != 0 -> free = 1
           :: shown && (seen_let_go & BIT(r)) == 0 ->
              all = BIT(r);
              do
              :: looked == all -> break
              :: looked != all ->
                 d_step {
                   j = 0;
                   do
                   :: (all & ~looked & BIT(j)) != 0 -> break
                   :: else -> j++
                   od;
                   sum_progress(waits_for[j], sum);
                   if
#ifdef NO_PROGRESS
                   :: !waiting[j] || (seen_let_go & BIT(j)) != 0 -> all = 0; looked = 0
#else
                   :: !waiting[j] || (seen_let_go & BIT(j)) != 0 || sum != seen_progress[j] -> all = 0; looked = 0
#endif
                   :: else -> looked = looked | BIT(j); theirs[j] = waits_for[j]; all = all | theirs[j]
                   fi;
                   j = 0; sum = 0
                 }
              od;
              d_step {
                to_this = BIT(r);
                do
                :: before == to_this -> break
                :: before != to_this ->
                   before = to_this;
                   i = 0;
                   do
                   :: i < RANKS ->
                      if
                      :: (all & BIT(i)) != 0 && (theirs[i] & before) != 0 -> to_this = to_this | BIT(i)
                      :: else
                      fi;
                      i++
                   :: i == RANKS -> break
                   od
                od;
                i = 0;
#ifdef ONE_BY_ONE
                do
                :: i < RANKS ->
                   if
                   :: (all & BIT(i)) != 0 && (needs[AT(r, made[r], i)] > made[i] + 1) -> all = 0
                   :: else
                   fi;
                   i++
                :: i == RANKS -> break
                od;
                i = 0;
#endif
#ifdef NO_MUTUAL
                to_this = all;
#endif
                if
                :: all != 0 && to_this == all && !grown[r] && let_go == seen_let_go ->
                   i = 0;
                   do
                   :: i < RANKS ->
                      if
                      :: (all & BIT(i)) != 0 && !in_collective[i] -> let_go = let_go | BIT(i)
                      :: else
                      fi;
                      i++
                   :: i == RANKS -> break
                   od;
                   i = 0;
                   grow(); tell(); free = 1
                :: else
                fi;
                all = 0; looked = 0; to_this = 0; before = 0; theirs[0] = 0; theirs[1] = 0; theirs[RANKS - 1] = 0
              }
           fi;
           seen_let_go = 0;
           if
           :: free
           :: !free -> (news[r] || closing[r])
           fi
        fi
     od;
     atomic {
       made[r]++;
       tell();
#ifndef CROSS
       nobody_waits_for_the_paused()
#endif
     };
     atomic { progress[r]++; tell() };
     atomic { waiting[r] = 0; shown = 0; free = 0; tell() };
     atomic {
#ifndef NO_VERSION
       grow();
#endif
       let_go = let_go & ~BIT(r); tell(); inside[r] = 0
     }
  od
}

proctype pauser(byte r) {
  byte i, j, k;
  closing[r] = 1;
  !inside[r];
#ifndef CROSS
  atomic { nobody_waits_for_the_paused() };
#endif
  closing[r] = 0
}

inline part(r, p) {
  needs[AT(r, parts[r], p)] = parts[p] + 1
}

inline both(part_is_collective) {
  collective[parts[0]] = part_is_collective; collective[PARTS + parts[1]] = part_is_collective;
  part(0, 1); part(1, 0); parts[0]++; parts[1]++
}

init {
  byte n;
  atomic {
#ifdef CROSS
    needs[AT(0, 0, 1)] = 2; needs[AT(0, 1, 1)] = 1;
    needs[AT(1, 0, 0)] = 2; needs[AT(1, 1, 0)] = 1;
    parts[0] = 2; parts[1] = 2;
#endif
    do
    :: n == ROUNDS -> break
    :: n < ROUNDS ->
       n++;
       if
       :: both(0)
       :: both(1)
#if RANKS == 3
       :: part(1, 2); part(2, 1); parts[1]++; parts[2]++
       :: part(0, 1); part(0, 2); part(1, 0); part(1, 2); part(2, 0); part(2, 1); parts[0]++; parts[1]++; parts[2]++
       :: part(0, 1); part(0, 2); part(1, 0); part(2, 0); parts[0]++; parts[1]++; parts[2]++
#endif
       fi
    od;
    n = 0;
    do
    :: n < RANKS ->
       run rank(n);
       if
       :: n < PAUSERS -> run pauser(n)
       :: else
       fi;
       n++
    :: n == RANKS -> break
    od
  }
}
